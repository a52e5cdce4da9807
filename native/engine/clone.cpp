#include "tierload/clone.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "engine/gather.h"
#include "tierload/bytes.h"
#include "tierload/error.h"

namespace tierload {
namespace {

constexpr uint64_t place_alignment = 4096;
constexpr std::chrono::microseconds look(200);  // between two looks, while a time limit runs

uint64_t bytes_of_page(const PageSource& source) {
  uint64_t bytes = 0;
  for (const SourcePart& part : source.parts) bytes += part.length;
  return bytes;
}

// The accelerator that a page is cloned on; 0: it has nothing of one.
uint8_t device_among(const PageSource& source) {
  for (const SourcePart& part : source.parts) {
    if (part.device != 0) return part.device;
  }
  return 0;
}

uint64_t address(const std::byte* at) { return reinterpret_cast<uint64_t>(at); }

}  // namespace

std::vector<CloneRoom> Clone::room_of(const PageSet& pages) {
  std::map<uint8_t, uint64_t> needed;
  for (const PageSource& source : pages.sources) {
    if (const uint8_t device = device_among(source)) {
      needed[device] += round_up(bytes_of_page(source), place_alignment);
    }
  }
  std::vector<CloneRoom> rooms;
  for (const auto& [device, bytes] : needed) rooms.push_back({device, 0, bytes, 0});
  return rooms;
}

Clone::Clone(std::shared_ptr<const PageSet> from, std::span<const CloneRoom> rooms)
    : from_(std::move(from)), parts_(from_->sources.size()), sources_(from_->sources) {
  std::map<uint8_t, CloneRoom> left;
  for (const CloneRoom& room : rooms) left[room.device] = room;
  for (size_t page = 0; page < sources_.size(); ++page) {
    const uint8_t device = device_among(sources_[page]);
    if (device == 0) continue;
    const uint64_t bytes = bytes_of_page(sources_[page]);
    const uint64_t place = round_up(bytes, place_alignment);
    CloneRoom& room = left[device];
    if (room.bytes < place) throw UsageError("a clone needs more room on accelerator " + std::to_string(device));
    parts_[page] = {reinterpret_cast<const std::byte*>(room.at), bytes, nullptr, 0, device};
    room.at += place;
    room.bytes -= place;
    sources_[page].parts = std::span(&parts_[page], 1);
  }
  begin(rooms);
}

// One launch an accelerator. What pages have of other memory goes through pinned memory, which the accelerator reads by
// itself: it is read once.
void Clone::begin(std::span<const CloneRoom> rooms) {
  std::map<uint8_t, std::vector<DeviceCopy>> copies;
  std::map<uint8_t, std::unique_ptr<Lane>> lanes;
  std::vector<std::shared_ptr<Moment>> fetched;  // by other accelerators than the one that has the page
  for (const CloneRoom& room : rooms) lanes[room.device] = accelerator(room.device).lane_of(room.stream);
  const auto is_elsewhere = [&](size_t page, const SourcePart& part) { return part.device != parts_[page].device; };
  uint64_t elsewhere = 0;
  for (size_t page = 0; page < sources_.size(); ++page) {
    if (!has(page)) continue;
    for (const SourcePart& part : from_->sources[page].parts) elsewhere += is_elsewhere(page, part) ? part.length : 0;
  }
  if (elsewhere > 0) from_host_ = accelerator(rooms.front().device).pin(elsewhere);
  MutableBytes free = from_host_ ? from_host_->memory() : MutableBytes();
  for (size_t page = 0; page < sources_.size(); ++page) {
    if (!has(page)) continue;
    uint64_t into = address(parts_[page].base);
    std::vector<DeviceCopy>& of_device = copies[parts_[page].device];
    for (const SourcePart& part : from_->sources[page].parts) {
      uint64_t at = address(part.base);
      if (is_elsewhere(page, part)) {
        const MutableBytes room = free.first(part.length);
        free = free.subspan(part.length);
        at = address(room.data());
        if (part.device != 0) {
          lanes.at(part.device)->to_host(room.data(), address(part.base), part.length);
          fetched.push_back(lanes.at(part.device)->moment());
        } else if (part.view) {
          gather(*part.view, part.base, part.from, room);
        } else {
          std::memcpy(room.data(), part.base, part.length);
        }
      }
      // Pages of one tensor lie together here as they do there.
      if (!of_device.empty() && of_device.back().from + of_device.back().length == at &&
          of_device.back().into + of_device.back().length == into) {
        of_device.back().length += part.length;
      } else {
        of_device.push_back({at, into, part.length});
      }
      into += part.length;
    }
  }
  for (const auto& [device, of_device] : copies) {
    for (const auto& moment : fetched) lanes.at(device)->after(moment);
    lanes.at(device)->copy(of_device);
    moments_.push_back(lanes.at(device)->moment());
  }
}

bool Clone::wait_done(std::chrono::nanoseconds timeout) {
  if (timeout.count() < 0) {
    for (const auto& moment : moments_) moment->wait();
    return true;
  }
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!std::ranges::all_of(moments_, [](const auto& moment) { return moment->passed(); })) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(look);
  }
  return true;
}

}  // namespace tierload
