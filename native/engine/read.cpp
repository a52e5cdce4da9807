// Loading and verifying pages. Wanted pages that lie close together in a segment are read with one call; a raw page
// that goes whole to one place is read straight into it. What accelerators get is copied there beside further reads.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "engine/page_parts.h"

namespace tierload {
namespace {

class PageReader {
 public:
  PageReader(Storage& storage, const Manifest& manifest, PageParts parts, std::span<uint8_t> touched,
             Progress* progress, const Moments& moments)
      : storage_(storage),
        manifest_(manifest),
        parts_(parts),
        touched_(touched),
        progress_(progress),
        moments_(moments) {}

  std::vector<PageFailure> run(std::vector<Want> wants, unsigned threads, bool stop_at_first) {
    wants_ = std::move(wants);
    stop_at_first_ = stop_at_first;
    groups_ = parts_.group(wants_);
    need_ = parts_.need(wants_, groups_);
    const size_t workers = std::min<size_t>(threads, groups_.size());
    fetch_ = storage_.fetch(segment_paths(), parts_.ranges(wants_, groups_),
                            static_cast<unsigned>(std::max<size_t>(workers, 1)));
    if (workers <= 1) {
      work();
    } else {
      std::vector<std::thread> pool;
      for (size_t i = 0; i < workers; ++i) pool.emplace_back([this] { guarded_work(); });
      for (std::thread& worker : pool) worker.join();
      if (error_) std::rethrow_exception(error_);
    }
    std::sort(failures_.begin(), failures_.end(),
              [](const PageFailure& a, const PageFailure& b) { return a.page < b.page; });
    return std::move(failures_);
  }

 private:
  void guarded_work() {
    try {
      work();
    } catch (...) {
      const std::lock_guard guard(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
    }
  }

  std::vector<std::string> segment_paths() const {
    std::vector<std::string> paths;
    for (const SegmentRow& segment : manifest_.segments()) paths.push_back(segment.path());
    return paths;
  }

  void work() {
    PageScratch scratch(moments_);
    while (!stop_) {
      const MutableBytes room = need_.device ? scratch.landing.read.take(need_.device, need_.bytes) : MutableBytes();
      const auto arrival = fetch_->next(room);
      if (!arrival) break;
      const Taken taken{*fetch_, *arrival};
      use(*arrival, groups_[arrival->range], scratch);
      if (need_.device) scratch.landing.read.used(scratch.landing.moment());
    }
    scratch.landing.settle();
  }

  void use(const Fetch::Arrival& arrival, const Group& group, PageScratch& scratch) {
    const Want& first = wants_[group.first];
    if (parts_.in_place(first)) touched_[first.first_part] = 1;
    for (size_t i = group.first; i < group.end && !stop_; ++i) {
      const Want& want = wants_[i];
      const PageRow& row = *want.row;
      const uint64_t at = row.offset - group.offset;
      const uint64_t extent = parts_.extent(row);
      try {
        if (!arrival.error.empty()) throw CorruptError(arrival.error);
        if (at + extent > arrival.bytes.size()) throw CorruptError("the segment ends inside the page");
        parts_.finish(want, arrival.bytes.subspan(at, extent), scratch, touched_);
      } catch (const CorruptError& error) {
        const std::lock_guard guard(mutex_);
        failures_.push_back({want.page, manifest_.segments()[row.segment].path(), row.offset, error.what()});
        if (stop_at_first_) stop_ = true;
      }
      if (progress_) progress_->bytes += row.raw_length;
    }
  }

  Storage& storage_;
  const Manifest& manifest_;
  const PageParts parts_;
  const std::span<uint8_t> touched_;
  Progress* const progress_;
  const Moments moments_;
  PageParts::Need need_;
  std::vector<Want> wants_;
  std::vector<Group> groups_;
  bool stop_at_first_ = true;
  std::unique_ptr<Fetch> fetch_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::vector<PageFailure> failures_;
  std::exception_ptr error_;
};

// Of raw pages that are whole in accelerators' memory, the first whose bytes are not those that were saved.
std::optional<PageFailure> first_damaged(const Manifest& manifest, std::span<const Want> wants,
                                         std::span<const PagePart> parts) {
  std::vector<SourcePart> places;
  for (const Want& want : wants) {
    const PagePart& part = parts[want.first_part];
    places.push_back({part.into.data(), part.into.size(), nullptr, 0, part.device});
  }
  std::vector<PageSource> sources(wants.size());
  for (size_t i = 0; i < wants.size(); ++i) sources[i].parts = std::span(&places[i], 1);
  const std::vector<std::optional<Digest>> digests = device_digests(sources);
  for (size_t i = 0; i < wants.size(); ++i) {
    const PageRow& row = *wants[i].row;
    if (digests[i] == row.raw_digest) continue;
    return PageFailure{wants[i].page, manifest.segments()[row.segment].path(), row.offset,
                       "the stored bytes do not match their digest"};
  }
  return std::nullopt;
}

}  // namespace

CorruptPageError corrupt_page(const PageFailure& failure) {
  return CorruptPageError("page " + std::to_string(failure.page) + " (" + failure.path + " at byte " +
                              std::to_string(failure.offset) + "): " + failure.what,
                          failure.page, failure.path, failure.offset);
}

void read_pages(Storage& storage, const Manifest& manifest, std::span<const PagePart> parts, unsigned threads,
                std::span<uint8_t> touched, Progress* progress, const Moments& moments,
                std::span<const uint8_t> landed) {
  if (touched.size() != parts.size()) throw UsageError("one touched byte is needed for each part");
  if (!landed.empty() && landed.size() != parts.size()) throw UsageError("one landed byte is needed for each part");
  const PageParts how(parts, false, PageParts::usual_call_bytes, true);
  std::vector<Want> wants = wants_of(parts, manifest.pages());
  std::vector<Want> there;  // that accelerators verify
  for (const Want& want : wants) {
    if (how.device(want) != 0 && how.straight(want)) there.push_back(want);
  }
  const auto is_landed = [&](const Want& want) { return !landed.empty() && landed[want.first_part] != 0; };
  for (const Want& want : wants) {
    if (!is_landed(want)) continue;
    if (!how.straight(want) || how.device(want) == 0) throw UsageError("only whole raw pages can be there already");
    touched[want.first_part] = 1;
    if (progress) progress->bytes += want.row->raw_length;
  }
  std::erase_if(wants, is_landed);
  PageReader reader(storage, manifest, how, touched, progress, moments);
  const auto failures = reader.run(std::move(wants), threads, true);
  if (!failures.empty()) throw corrupt_page(failures.front());
  if (const auto failure = first_damaged(manifest, there, parts)) throw corrupt_page(*failure);
}

std::vector<PageFailure> check_pages(Storage& storage, const Manifest& manifest, std::span<const uint32_t> pages,
                                     unsigned threads, Progress* progress) {
  const std::span<const PageRow> rows = manifest.pages();
  std::vector<Want> wants;
  for (const uint32_t page : pages) {
    if (page >= rows.size()) throw UsageError("there is no page " + std::to_string(page));
    wants.push_back({&rows[page], page, rows[page].segment, 0, 0, 0});
  }
  PageReader reader(storage, manifest, PageParts({}, true), {}, progress, {});
  return reader.run(std::move(wants), threads, false);
}

}  // namespace tierload
