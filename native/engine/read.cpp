// Loading and verifying pages. Wanted pages that lie close together in a segment are read with one call; a raw page
// that goes whole to one place is read straight into it.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "tierload/bytes.h"
#include "tierload/engine.h"

namespace tierload {
namespace {

constexpr uint64_t read_call_bytes = 4u << 20;
constexpr uint64_t gaps_share = 64;  // at most one sector of so many in a call is one that nobody wants

// The parts of one page.
struct Want {
  uint32_t page = 0;
  uint32_t first_part = 0;
  uint32_t parts = 0;
};

// Wants that one call reads.
struct Group {
  size_t first = 0;
  size_t end = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t gaps = 0;  // whole sectors that nobody wants
};

class PageReader {
 public:
  PageReader(Storage& storage, const Manifest& manifest, std::span<const PagePart> parts, bool verify_padding,
             std::span<uint8_t> touched, Progress* progress)
      : storage_(storage),
        manifest_(manifest),
        rows_(manifest.pages()),
        parts_(parts),
        verify_padding_(verify_padding),
        touched_(touched),
        progress_(progress) {}

  std::vector<PageFailure> run(std::vector<Want> wants, unsigned threads, bool stop_at_first) {
    wants_ = std::move(wants);
    stop_at_first_ = stop_at_first;
    std::stable_sort(wants_.begin(), wants_.end(), [&](const Want& a, const Want& b) {
      const PageRow& left = rows_[a.page];
      const PageRow& right = rows_[b.page];
      return std::pair(left.segment, left.offset) < std::pair(right.segment, right.offset);
    });
    group();
    const size_t workers = std::min<size_t>(threads, groups_.size());
    fetch_ = storage_.fetch(segment_paths(), ranges(), static_cast<unsigned>(std::max<size_t>(workers, 1)));
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
  // A raw page that goes whole to one place needs no buffer, so it is a group of its own.
  bool direct(const Want& want) const {
    const PageRow& row = rows_[want.page];
    return row.codec == static_cast<uint8_t>(Codec::raw) && want.parts == 1 && !verify_padding_ &&
           parts_[want.first_part].into.size() == row.raw_length;
  }

  uint64_t extent(const PageRow& row) const {
    return verify_padding_ ? round_up(row.stored_length, sector) : row.stored_length;
  }

  void group() {
    for (size_t i = 0; i < wants_.size(); ++i) {
      const PageRow& row = rows_[wants_[i].page];
      const uint64_t end = row.offset + extent(row);
      if (!groups_.empty()) {
        Group& last = groups_.back();
        const Want& before = wants_[last.end - 1];
        const uint64_t last_end = last.offset + last.length;
        const uint64_t sectors_end = round_up(last_end, sector);
        const uint64_t gaps = last.gaps + (row.offset > sectors_end ? row.offset - sectors_end : 0);
        if (rows_[before.page].segment == row.segment && !direct(before) && !direct(wants_[i]) &&
            end - last.offset <= read_call_bytes && gaps <= (end - last.offset) / gaps_share) {
          last.end = i + 1;
          last.length = std::max(last_end, end) - last.offset;
          last.gaps = gaps;
          continue;
        }
      }
      groups_.push_back({i, i + 1, row.offset, end - row.offset, 0});
    }
  }

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

  std::vector<Fetch::Range> ranges() {
    std::vector<Fetch::Range> out;
    for (const Group& group : groups_) {
      const Want& first = wants_[group.first];
      Fetch::Range range{rows_[first.page].segment, group.offset, group.length, nullptr};
      if (direct(first)) range.into = parts_[first.first_part].into.data();
      out.push_back(range);
    }
    return out;
  }

  // Given back also when its user fails: others would wait for its room for ever.
  struct Taken {
    Fetch& fetch;
    const Fetch::Arrival& arrival;
    ~Taken() { fetch.release(arrival); }
  };

  void work() {
    CodecScratch scratch;
    std::vector<std::byte> raw;
    while (!stop_) {
      const auto arrival = fetch_->next();
      if (!arrival) return;
      const Taken taken{*fetch_, *arrival};
      use(*arrival, groups_[arrival->range], scratch, raw);
    }
  }

  void use(const Fetch::Arrival& arrival, const Group& group, CodecScratch& scratch, std::vector<std::byte>& raw) {
    const bool straight = direct(wants_[group.first]);
    if (straight) touched_[wants_[group.first].first_part] = 1;
    for (size_t i = group.first; i < group.end && !stop_; ++i) {
      const Want& want = wants_[i];
      const PageRow& row = rows_[want.page];
      const uint64_t at = row.offset - group.offset;
      try {
        if (!arrival.error.empty()) throw CorruptError(arrival.error);
        if (at + extent(row) > arrival.bytes.size()) throw CorruptError("the segment ends inside the page");
        finish(want, arrival.bytes.subspan(at, extent(row)), straight, scratch, raw);
      } catch (const CorruptError& error) {
        const std::lock_guard guard(mutex_);
        failures_.push_back({want.page, manifest_.segments()[row.segment].path(), row.offset, error.what()});
        if (stop_at_first_) stop_ = true;
      }
      if (progress_) progress_->bytes += row.raw_length;
    }
  }

  void finish(const Want& want, Bytes extent, bool straight, CodecScratch& scratch, std::vector<std::byte>& raw) {
    const PageRow& row = rows_[want.page];
    const Bytes stored = extent.first(row.stored_length);
    if (tree_digest(stored, page_leaf) != row.stored_digest) {
      throw CorruptError("the stored bytes do not match their digest");
    }
    for (const std::byte padding : extent.subspan(row.stored_length)) {
      if (padding != std::byte{0}) throw CorruptError("the padding behind the page is not zero");
    }
    const Codec codec = static_cast<Codec>(row.codec);
    Bytes page = stored;
    if (codec != Codec::raw) {
      const bool whole = want.parts == 1 && parts_[want.first_part].into.size() == row.raw_length;
      MutableBytes into;
      if (whole) {
        touched_[want.first_part] = 1;
        into = parts_[want.first_part].into;
      } else {
        if (raw.size() < row.raw_length) raw.resize(row.raw_length);
        into = MutableBytes(raw).first(row.raw_length);
      }
      decode_page(stored, codec, row.item_size, into, scratch);
      if (tree_digest(into, page_leaf) != row.raw_digest) {
        throw CorruptError("the decoded bytes do not match their digest");
      }
      if (whole) return;
      page = into;
    } else if (row.raw_digest != row.stored_digest) {
      throw CorruptError("the two digests of a raw page differ");
    }
    if (straight) return;
    for (uint32_t i = want.first_part; i < want.first_part + want.parts; ++i) {
      const PagePart& part = parts_[i];
      touched_[i] = 1;
      std::memcpy(part.into.data(), page.data() + part.page_offset, part.into.size());
    }
  }

  Storage& storage_;
  const Manifest& manifest_;
  const std::span<const PageRow> rows_;
  const std::span<const PagePart> parts_;
  const bool verify_padding_;
  const std::span<uint8_t> touched_;
  Progress* const progress_;
  std::vector<Want> wants_;
  std::vector<Group> groups_;
  bool stop_at_first_ = true;
  std::unique_ptr<Fetch> fetch_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::vector<PageFailure> failures_;
  std::exception_ptr error_;
};

}  // namespace

void read_pages(Storage& storage, const Manifest& manifest, std::span<const PagePart> parts, unsigned threads,
                std::span<uint8_t> touched, Progress* progress) {
  if (touched.size() != parts.size()) throw UsageError("one touched byte is needed for each part");
  std::vector<Want> wants;
  for (uint32_t i = 0; i < parts.size(); ++i) {
    const PagePart& part = parts[i];
    if (part.page >= manifest.pages().size()) throw UsageError("there is no page " + std::to_string(part.page));
    const PageRow& row = manifest.pages()[part.page];
    if (part.page_offset > row.raw_length || part.into.size() > row.raw_length - part.page_offset) {
      throw UsageError("a part lies outside of page " + std::to_string(part.page));
    }
    if (part.into.empty()) continue;
    if (wants.empty() || wants.back().page != part.page) wants.push_back({part.page, i, 0});
    wants.back().parts = i + 1 - wants.back().first_part;
  }
  PageReader reader(storage, manifest, parts, false, touched, progress);
  const auto failures = reader.run(std::move(wants), threads, true);
  if (failures.empty()) return;
  const PageFailure& first = failures.front();
  throw CorruptPageError("page " + std::to_string(first.page) + " (" + first.path + " at byte " +
                             std::to_string(first.offset) + "): " + first.what,
                         first.page, first.path, first.offset);
}

std::vector<PageFailure> check_pages(Storage& storage, const Manifest& manifest, std::span<const uint32_t> pages,
                                     unsigned threads, Progress* progress) {
  std::vector<Want> wants;
  for (const uint32_t page : pages) {
    if (page >= manifest.pages().size()) throw UsageError("there is no page " + std::to_string(page));
    wants.push_back({page, 0, 0});
  }
  PageReader reader(storage, manifest, {}, true, {}, progress);
  return reader.run(std::move(wants), threads, false);
}

}  // namespace tierload
