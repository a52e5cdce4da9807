// Saving pages. Workers digest and encode into a ring of slots; slots are placed in the order of their sources, so the
// layout is the same whatever the threads do; one writer puts runs of placed slots into the segment with one call each.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "engine/dedup.h"
#include "engine/page_bytes.h"
#include "engine/priority.h"
#include "engine/segment_pace.h"
#include "tierload/bytes.h"
#include "tierload/engine.h"

namespace tierload {
namespace {

constexpr uint64_t write_call_bytes = 8u << 20;
constexpr uint64_t little_bytes = 1u << 20;     // done in the time that threads take to start
constexpr uint64_t slot_bytes_max = 64u << 20;  // raw bytes of all pages on their way; scratch is about twice that

// Four pages a worker keep everybody busy, as far as memory allows.
size_t slot_count(std::span<const PageSource> sources, unsigned threads) {
  if (threads == 0) return 1;
  uint64_t largest = 1;
  for (const PageSource& source : sources) {
    uint64_t bytes = 0;
    for (const SourcePart& part : source.parts) bytes += part.length;
    largest = std::max(largest, bytes);
  }
  return std::clamp<uint64_t>(slot_bytes_max / largest, 2, uint64_t{4} * threads);
}

constexpr std::array<std::byte, sector> zeros{};

constexpr uint32_t none = 0xFFFFFFFF;

// A manifest whose pages are referred to.
struct Parent {
  explicit Parent(const Manifest& of) : manifest(of), table(of.pages().size()), segments(of.segments().size(), none) {
    for (uint32_t i = 0; i < of.pages().size(); ++i) table.insert(of.pages()[i].raw_digest, i);
  }
  const PageRow* find(const PageRow& wanted) const {
    const auto rows = manifest.pages();
    const int64_t found =
        table.find(wanted.raw_digest, wanted.raw_length, [&](uint32_t i) -> const PageRow& { return rows[i]; });
    return found < 0 ? nullptr : &rows[static_cast<size_t>(found)];
  }
  const Manifest& manifest;
  PageTable table;
  std::vector<uint32_t> segments;  // its segment number -> ours
};

// A page on its way. The encoded bytes live in the slot until they are written.
struct Slot {
  CodecScratch scratch;
  PageBytes bytes;
  Bytes raw;
  Encoded encoded;
  PageRow row;
  Parent* known = nullptr;  // that has it
  bool direct = false;      // it is written without coming here
  bool ready = false;
};

class PageWriter {
 public:
  PageWriter(ShardWriter& shard, std::span<const PageSource> sources, std::span<const Manifest* const> parents,
             const WriteOptions& options, Progress* progress)
      : shard_(shard),
        sources_(sources),
        options_(options),
        progress_(progress),
        own_table_(sources.size()),
        slots_(slot_count(sources, options.threads)),
        run_bytes_(options.bucket ? std::min(options.bucket->burst(), write_call_bytes) : write_call_bytes),
        pace_(*options.clock, options.flush_interval) {
    result_.pages.resize(sources.size());
    result_.compression = options.compression;
    for (const PageSource& source : sources) {
      for (const SourcePart& part : source.parts) bytes_left_ += part.length;
    }
    for (const Manifest* parent : parents) parents_.emplace_back(*parent);
  }

  WriteResult run() {
    digest_there();
    if (options_.threads == 0 || bytes_left_ < little_bytes) {
      Lanes lanes;
      for (size_t page = 0; page < sources_.size(); ++page) {
        prepare(page, slot(page), lanes);
        place(page);
        flush();
        done(page, page + 1);
        if (options_.gate) options_.gate->release(page + 1);
      }
    } else {
      run_threads();
    }
    if (segment_open_) end_segment();
    check_cancelled(options_.cancelled);
    result_.throttled_seconds = std::chrono::duration<double>(throttled_).count();
    return std::move(result_);
  }

 private:
  // Placed pages that are not written yet.
  struct Run {
    uint64_t length = 0;
    std::vector<Bytes> parts;
  };

  Slot& slot(size_t page) { return slots_[page % slots_.size()]; }

  // What accelerators have is digested there, so that what is known does not leave them.
  void digest_there() {
    const auto there = [](const PageSource& source) { return device_of(source) != 0; };
    if (std::ranges::none_of(sources_, there)) return;
    for (size_t page = 0; options_.gate && page < sources_.size(); ++page) {
      if (there(sources_[page])) options_.gate->wait(page);
    }
    digests_ = device_digests(sources_);
    known_.resize(sources_.size());
    for (size_t page = 0; page < sources_.size(); ++page) {
      if (digests_[page]) known_[page] = known(row_of(page)).first != nullptr;
    }
  }

  PageRow row_of(size_t page) const {
    PageRow row;
    row.raw_digest = *digests_[page];
    row.raw_length = static_cast<uint32_t>(sources_[page].parts[0].length);
    return row;
  }

  // The parent's row of a page, and the parent, if any has it.
  std::pair<const PageRow*, Parent*> known(const PageRow& row) {
    for (Parent& parent : parents_) {
      if (const PageRow* found = parent.find(row)) return {found, &parent};
    }
    return {nullptr, nullptr};
  }

  // Anything that needs only the page itself: may run on any thread, in any order.
  void prepare(size_t page, Slot& at, Lanes& lanes) {
    const PageSource& source = sources_[page];
    const bool digested = !digests_.empty() && digests_[page];
    at.direct = false;
    if (digested) {
      at.row = row_of(page);
    } else {
      take(page, at, lanes);
      at.row = {};
      at.row.raw_digest = tree_digest(at.raw, page_leaf);
      at.row.raw_length = static_cast<uint32_t>(at.raw.size());
    }
    at.row.item_size = source.item_size;
    const auto [found, parent] = known(at.row);
    at.known = parent;
    if (found) at.row = *found;
    at.row.flags = source.packed ? page_packed : 0;
    if (found) return;
    if (digested && options_.direct && at.row.raw_length % sector == 0 && compression_of(source) == Compression::off) {
      at.direct = true;
      at.row.codec = static_cast<uint8_t>(Codec::raw);
      at.row.stored_length = at.row.raw_length;
      at.row.stored_digest = at.row.raw_digest;
      return;
    }
    if (digested) take(page, at, lanes);
    at.encoded = encode_page(at.raw, source.item_size, source.floating, compression_of(source), at.scratch);
    at.row.codec = static_cast<uint8_t>(at.encoded.codec);
    at.row.stored_length = static_cast<uint32_t>(at.encoded.bytes.size());
    at.row.stored_digest =
        at.encoded.codec == Codec::raw ? at.row.raw_digest : tree_digest(at.encoded.bytes, page_leaf);
  }

  void take(size_t page, Slot& at, Lanes& lanes) {
    if (options_.gate) options_.gate->wait(page);
    at.raw = at.bytes.of(sources_[page], lanes);
  }

  Compression compression_of(const PageSource& source) {
    const Compression usual = compression();
    return source.hot && usual == Compression::fast && hot_is_raw() ? Compression::off : usual;
  }

  // Decided for the whole save by the first page that needs it: an unchanged state tries nothing.
  Compression compression() {
    std::call_once(chosen_, [this] {
      if (options_.device_rate) {
        result_.compression = choose_compression(samplable(), options_.threads, *options_.device_rate);
      }
    });
    return result_.compression;
  }

  // Likewise, by the first hot one.
  bool hot_is_raw() {
    std::call_once(hot_chosen_, [this] {
      if (options_.read_rate) {
        hot_is_raw_ = raw_loads_faster(samplable(), options_.threads, *options_.read_rate);
      }
    });
    return hot_is_raw_;
  }

  // The pages that come whatever the others do.
  Sampling samplable() const {
    const size_t reach = options_.gate ? options_.gate->reach() : sources_.size();
    return {sources_.first(reach), known_, options_.gate, options_.samples};
  }

  // Gives the page its place, in the order of sources, and queues what has to be written.
  void place(size_t page) {
    check_cancelled(options_.cancelled);
    Slot& at = slot(page);
    result_.raw_bytes += at.row.raw_length;
    if (at.known) {
      uint32_t& segment = at.known->segments[at.row.segment];
      if (segment == none) segment = referred(at.known->manifest.segments()[at.row.segment]);
      at.row.segment = segment;
    } else {
      const int64_t twin = own_table_.find(at.row.raw_digest, at.row.raw_length,
                                           [&](uint32_t i) -> const PageRow& { return result_.pages[i]; });
      if (twin >= 0) {
        const uint32_t flags = at.row.flags;
        at.row = result_.pages[static_cast<size_t>(twin)];
        at.row.flags = flags;
      } else {
        own_table_.insert(at.row.raw_digest, static_cast<uint32_t>(page));
        put(at, sources_[page]);
      }
    }
    result_.pages[page] = at.row;
    bytes_left_ -= at.row.raw_length;
  }

  // Our number of a segment that is not new; parents may share it.
  uint32_t referred(const SegmentRow& segment) {
    for (uint32_t i = 0; i < result_.segments.size(); ++i) {
      if (result_.segments[i].same_file(segment)) return i;
    }
    result_.segments.push_back(segment);
    return static_cast<uint32_t>(result_.segments.size() - 1);
  }

  void put(Slot& at, const PageSource& source) {
    const uint64_t length = round_up(at.row.stored_length, sector);
    if (segment_open_ && (offset_ + length > options_.segment_bytes || due(length))) end_segment();
    if (!segment_open_) {
      SegmentRow row;
      shard_.open_segment(row, std::min(options_.segment_bytes, bytes_left_), options_.direct != nullptr);
      segment_open_ = true;
      open_segment_ = static_cast<uint32_t>(result_.segments.size());
      result_.segments.push_back(row);
      offset_ = 0;
      pace_.begin();
    }
    at.row.segment = open_segment_;
    at.row.offset = offset_;
    offset_ += length;
    result_.written_bytes += length;
    ++result_.written_pages;
    if (at.direct) {
      write_run();
      shard_.skip(length);
      extents_.push_back({at.row.offset, reinterpret_cast<uint64_t>(source.parts[0].base), length});
      ++result_.direct_pages;
      return;
    }
    if (pending_.length + length > run_bytes_) write_run();
    pending_.length += length;
    pending_.parts.push_back(at.encoded.bytes);
    if (length > at.row.stored_length) pending_.parts.push_back(Bytes(zeros).first(length - at.row.stored_length));
  }

  void flush() {
    write_run();
    if (segment_open_ && due(0)) end_segment();
  }

  // Whether the open segment would be late with `next` more bytes.
  bool due(uint64_t next) {
    if (!pace_.bounded()) return false;
    const auto wait = options_.bucket ? options_.bucket->wait_of(pending_.length + next) : SegmentPace::Time(0);
    return pace_.left() <= wait;
  }

  void end_segment() {
    const auto from = pace_.now();
    const auto throttled = throttled_;
    write_run();
    if (!extents_.empty()) {
      options_.direct->write(result_.segments[open_segment_].path(), extents_);
      extents_.clear();
    }
    shard_.end_segment();
    segment_open_ = false;
    result_.segments[open_segment_].size = offset_;
    pace_.end(result_, offset_, from, throttled_ - throttled);
  }

  void write_run() {
    if (options_.bucket) {
      write_capped(*options_.bucket);
    } else if (!pending_.parts.empty()) {
      shard_.append(pending_.parts);
    }
    pending_ = {};
  }

  // One page may be larger than the burst, which is whole blocks too.
  void write_capped(TokenBucket& bucket) {
    std::vector<Bytes> piece;
    uint64_t length = 0;
    for (Bytes part : pending_.parts) {
      while (!part.empty()) {
        const Bytes head = part.first(std::min(part.size(), bucket.burst() - length));
        part = part.subspan(head.size());
        piece.push_back(head);
        length += head.size();
        pending_.length -= head.size();
        if (length < bucket.burst() && pending_.length > 0) continue;
        throttled_ += bucket.take(length, options_.cancelled);
        shard_.append(piece);
        piece.clear();
        length = 0;
      }
    }
  }

  void done(size_t first, size_t end) {
    if (!progress_) return;
    for (size_t page = first; page < end; ++page) progress_->bytes += result_.pages[page].raw_length;
  }

  void run_threads() {
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < options_.threads; ++i) {
      workers.emplace_back([this] {
        if (options_.background) lower_priority();
        guarded([this] { work(); });
      });
    }
    guarded([this] { write_in_order(); });
    for (std::thread& worker : workers) worker.join();
    if (error_) std::rethrow_exception(error_);
  }

  template <typename Body>
  void guarded(Body body) {
    try {
      body();
    } catch (...) {
      {
        const std::lock_guard guard(mutex_);
        if (!error_) error_ = std::current_exception();
        changed_.notify_all();
      }
      // Workers may wait for pages that wait for the release of others, which nobody will write any more.
      if (options_.gate) options_.gate->release(sources_.size());
    }
  }

  void work() {
    Lanes lanes;
    while (true) {
      size_t page;
      {
        std::unique_lock guard(mutex_);
        page = next_++;
        // Back-pressure: a slot is free only when the page that had it before is written.
        changed_.wait(guard, [&] { return error_ || page >= sources_.size() || page < written_ + slots_.size(); });
        if (error_ || page >= sources_.size()) return;
      }
      prepare(page, slot(page), lanes);
      const std::lock_guard guard(mutex_);
      slot(page).ready = true;
      changed_.notify_all();
    }
  }

  // The caller's thread: places pages as they become ready and writes them in long runs.
  void write_in_order() {
    size_t page = 0;
    while (page < sources_.size()) {
      size_t end = page;
      {
        std::unique_lock guard(mutex_);
        while (!changed_.wait_for(guard, patience(), [&] { return error_ || slot(page).ready; })) {
          guard.unlock();
          check_cancelled(options_.cancelled);
          flush();
          guard.lock();
        }
        if (error_) return;
        while (end < sources_.size() && end < page + slots_.size() && slot(end).ready) {
          slot(end).ready = false;
          ++end;
        }
      }
      for (size_t at = page; at < end; ++at) place(at);
      flush();
      done(page, end);
      if (options_.gate) options_.gate->release(end);
      const std::lock_guard guard(mutex_);
      page = end;
      written_ = end;
      changed_.notify_all();
    }
  }

  // How long the writer may wait for a page before it has to look at the open segment's time.
  std::chrono::nanoseconds patience() const {
    std::chrono::nanoseconds time = options_.cancelled ? std::chrono::nanoseconds(cancel_poll) : std::chrono::hours(1);
    if (segment_open_ && pace_.bounded()) time = std::min(time, pace_.left());
    return std::max<std::chrono::nanoseconds>(time, std::chrono::milliseconds(1));
  }

  ShardWriter& shard_;
  const std::span<const PageSource> sources_;
  const WriteOptions options_;
  Progress* const progress_;
  std::vector<Parent> parents_;
  PageTable own_table_;
  std::vector<std::optional<Digest>> digests_;  // of pages that accelerators have; empty: of none
  std::vector<uint8_t> known_;                  // 1 for those of them that a parent has
  std::vector<DirectWriter::Extent> extents_;   // of the open segment, not written yet
  std::vector<Slot> slots_;
  WriteResult result_;
  bool segment_open_ = false;
  uint64_t bytes_left_ = 0;  // raw, of pages that have no place yet
  Run pending_;
  const uint64_t run_bytes_;
  SegmentPace pace_;
  SegmentPace::Time throttled_{0};
  uint32_t open_segment_ = 0;
  uint64_t offset_ = 0;

  std::once_flag chosen_;
  std::once_flag hot_chosen_;
  bool hot_is_raw_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t next_ = 0;
  size_t written_ = 0;
  std::exception_ptr error_;
};

}  // namespace

WriteResult write_pages(ShardWriter& shard, std::span<const PageSource> sources,
                        std::span<const Manifest* const> parents, const WriteOptions& options, Progress* progress) {
  std::optional<LowIoPriority> low;
  if (options.background) low.emplace();
  return PageWriter(shard, sources, parents, options, progress).run();
}

}  // namespace tierload
