#include "engine/page_bytes.h"

#include <algorithm>
#include <cstring>

#include "engine/gather.h"
#include "tierload/bytes.h"
#include "tierload/digest.h"

namespace tierload {
namespace {

// Leaves that an accelerator digests at a time: 16 GiB of pages, whose digests take 8 MiB.
constexpr uint64_t leaves_max = 1u << 20;

uint64_t leaves_of(uint64_t bytes) { return (bytes + page_leaf - 1) / page_leaf; }

// The digests of pages of one accelerator.
void digest_on(uint8_t device, std::span<const PageSource> sources, std::span<const size_t> pages,
               std::vector<std::optional<Digest>>& digests) {
  uint64_t most = 0;
  for (const size_t page : pages) most += leaves_of(sources[page].parts[0].length);
  const auto room = accelerator(device).pin(std::min(most, leaves_max) * sizeof(uint64_t));
  auto* const leaves = reinterpret_cast<uint64_t*>(room->memory().data());
  const std::unique_ptr<Lane> lane = accelerator(device).lane();  // waits, when it goes, before the room does
  for (size_t at = 0; at < pages.size();) {
    std::vector<DeviceRun> runs;
    uint64_t count = 0;
    for (size_t i = at; i < pages.size(); ++i) {
      const SourcePart& part = sources[pages[i]].parts[0];
      if (count + leaves_of(part.length) > leaves_max) break;
      runs.push_back({reinterpret_cast<uint64_t>(part.base), part.length});
      count += leaves_of(part.length);
    }
    lane->digest(runs, leaves);
    lane->wait();
    const uint64_t* of_page = leaves;
    for (const DeviceRun& run : runs) {
      digests[pages[at++]] = tree_root({of_page, leaves_of(run.length)}, run.length);
      of_page += leaves_of(run.length);
    }
  }
}

}  // namespace

uint8_t device_of(const PageSource& source) { return source.parts.size() == 1 ? source.parts[0].device : 0; }

std::vector<std::optional<Digest>> device_digests(std::span<const PageSource> sources) {
  std::vector<std::optional<Digest>> digests(sources.size());
  std::map<uint8_t, std::vector<size_t>> by_device;
  for (size_t page = 0; page < sources.size(); ++page) {
    if (const uint8_t device = device_of(sources[page])) by_device[device].push_back(page);
  }
  for (const auto& [device, pages] : by_device) digest_on(device, sources, pages, digests);
  return digests;
}

Bytes PageBytes::of(const PageSource& source, Lanes& lanes) {
  const auto there = [](const SourcePart& part) { return part.device != 0; };
  const auto first = std::ranges::find_if(source.parts, there);
  if (first == source.parts.end()) return raw_bytes(source, gathered_);
  uint64_t total = 0;
  for (const SourcePart& part : source.parts) total += part.length;
  if (!pinned_ || pinned_->memory().size() < total) pinned_ = accelerator(first->device).pin(total);
  MutableBytes left = pinned_->memory();
  for (const SourcePart& part : source.parts) {
    if (part.device != 0) {
      lanes.of(part.device).to_host(left.data(), reinterpret_cast<uint64_t>(part.base), part.length);
    } else if (part.view) {
      gather(*part.view, part.base, part.from, left.first(part.length));
    } else {
      std::memcpy(left.data(), part.base, part.length);
    }
    left = left.subspan(part.length);
  }
  lanes.wait();
  return pinned_->memory().first(total);
}

}  // namespace tierload
