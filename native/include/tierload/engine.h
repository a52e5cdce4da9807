// Pages in and out: workers, bounded buffers and order. It moves bytes and holds no policy.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tierload/accelerator.h"
#include "tierload/codec.h"
#include "tierload/error.h"
#include "tierload/manifest.h"
#include "tierload/pace.h"
#include "tierload/shard.h"

namespace tierload {

// Bytes moved so far; another thread may read it while a call is under way.
struct Progress {
  std::atomic<uint64_t> bytes{0};
};

// Elements in memory that do not lie back to back, from the outermost dimension in; strides are in bytes.
struct StridedView {
  struct Dim {
    uint64_t count;
    int64_t stride;
  };
  // Throws UsageError when there is no element.
  StridedView(uint64_t item_size, std::span<const uint64_t> counts, std::span<const int64_t> strides);
  uint64_t bytes() const;  // of all elements

  uint64_t item_bytes;    // what lies back to back: one element, or several
  std::vector<Dim> dims;  // the innermost first, merged where one continues the other; at least one
};

// A run of raw bytes: `length` bytes at `base`, or with a view at `base`, from byte `from` of its packed elements on.
// Those in the memory of an accelerator, whose number is `device`, have no view.
struct SourcePart {
  const std::byte* base = nullptr;
  uint64_t length = 0;
  const StridedView* view = nullptr;
  uint64_t from = 0;
  uint8_t device = 0;
};

// One page to be saved: its parts, one after the other, are its raw bytes.
struct PageSource {
  std::span<const SourcePart> parts;
  uint8_t item_size = 1;
  bool floating = false;
  bool packed = false;
  bool hot = false;  // to be loaded fast, where storage and load are at odds
};

// Where pages come from that are not there yet when their writing begins.
class PageGate {
 public:
  virtual ~PageGate() = default;
  // Returns when the bytes of a page are there; throws CancelledError when they never will be.
  virtual void wait(size_t page) = 0;
  // The pages before `end` are written, and not read again.
  virtual void release(size_t end) = 0;
  // So many of the first pages come even while none is released.
  virtual size_t reach() const = 0;
};

// Writes pages of accelerators into segments past the processor.
class DirectWriter {
 public:
  struct Extent {
    uint64_t offset = 0;  // in the file
    uint64_t at = 0;      // in an accelerator's memory
    uint64_t length = 0;  // whole blocks of 4 KiB
  };
  virtual ~DirectWriter() = default;
  // Returns when the file has all of them; it need not be durable.
  virtual void write(const std::string& path, std::span<const Extent> extents) = 0;
};

struct WriteOptions {
  unsigned threads = 0;  // workers beside the caller; 0: everything on the caller's thread, in a fixed order
  Compression compression = Compression::fast;
  std::optional<double> device_rate;  // bytes a second: choose_compression() decides, once a page has to be encoded
  std::optional<double> read_rate;    // bytes a second: raw_loads_faster() decides how hot pages are stored
  size_t samples = 8;                 // pages that each of them tries
  uint64_t segment_bytes = 128u << 20;
  PageGate* gate = nullptr;  // null: all pages are there
  // A segment ends early to be durable so long after its first byte was placed in it; 0: only its size ends it.
  std::chrono::nanoseconds flush_interval{0};
  TokenBucket* bucket = nullptr;                 // the cap on bytes a second; null: none
  const std::atomic<bool>* cancelled = nullptr;  // asked between pages and in waits
  bool background = false;                       // workers make room for others; the caller only on the disk
  DirectWriter* direct = nullptr;                // for raw pages of accelerators, without a cap; null: they come here
  TimeSource* clock = &steady_time();            // what flush_interval and times are measured with
};

struct SegmentTime {
  uint64_t bytes = 0;
  double seconds = 0;  // from the first byte's place in it until it was durable
};

struct WriteResult {
  std::vector<PageRow> pages;        // one for each source, in order
  std::vector<SegmentRow> segments;  // all that `pages` refer to: the parents' that are used, and the new ones
  uint64_t raw_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t written_pages = 0;
  uint64_t direct_pages = 0;                    // of these, those that a DirectWriter wrote
  Compression compression = Compression::fast;  // what was used
  std::vector<SegmentTime> times;               // of the new segments, in order
  uint64_t late_segments = 0;                   // that took longer than the flush interval
  double throttled_seconds = 0;                 // waits for the bucket
};

// Pages of which some are tried: the first ones, at most `most`; those with 1 in `known` (which may be empty) are not
// worth a try, since they will not be written.
struct Sampling {
  std::span<const PageSource> sources;
  std::span<const uint8_t> known;
  PageGate* gate = nullptr;
  size_t most = 8;
};

// `fast` where encoding these pages is faster than a device that takes `device_rate` bytes a second, else `off`: to try
// some takes milliseconds.
Compression choose_compression(const Sampling& sampling, unsigned threads, double device_rate);

// Whether hot pages that `fast` makes smaller load faster when they are stored raw all the same: where decoding takes
// longer than a device that gives `read_rate` bytes a second needs for what was saved. Some are tried, as above.
bool raw_loads_faster(const Sampling& sampling, unsigned threads, double read_rate);

// Digests every page, references those that one of `parents` or this call already has, encodes and writes the others
// into segments of `shard`, in order: the layout depends on the bytes alone, not on threads or time,
// except that a flush interval ends segments by the clock. Every segment is durable when it returns. Buffers are
// bounded: four pages a thread, and 64 MiB of raw bytes in all. Throws CancelledError.
WriteResult write_pages(ShardWriter& shard, std::span<const PageSource> sources,
                        std::span<const Manifest* const> parents, const WriteOptions& options, Progress* progress);

// The accelerator that a page's bytes are in, all of them together; 0: none.
uint8_t device_of(const PageSource& source);

// The raw digests of pages, found where they are: by the accelerators that device_of() names, each of its own. Others
// have none.
std::vector<std::optional<Digest>> device_digests(std::span<const PageSource> sources);

// The raw digest of every page, as write_pages() finds it; `threads` work beside the caller.
std::vector<Digest> digest_pages(std::span<const PageSource> sources, unsigned threads);

// A part of a page that is wanted: `into`, which is in the memory of accelerator `device` where that is not 0, gets the
// raw bytes from `page_offset` on.
struct PagePart {
  uint32_t page = 0;
  uint32_t page_offset = 0;
  MutableBytes into;
  uint8_t device = 0;
};

struct PageFailure {
  uint32_t page = 0;
  std::string path;
  uint64_t offset = 0;
  std::string what;
};

// The error that names a damaged page.
CorruptPageError corrupt_page(const PageFailure& failure);

// Reads the parts, which are sorted by page, and verifies every page that it touches: the stored digest before
// decoding, the raw one after. Neighbouring pages are read together. `touched` (one byte a part, zeroed by the caller)
// is set for each part whose memory may have been written, whatever happens. Throws CorruptPageError for the first bad
// page. Memory of accelerators is written after `moments` of theirs; raw pages that go there whole are verified there.
// `landed`, when it is not empty, has 1 for each part that is one of those and is there already, to be verified.
void read_pages(Storage& storage, const Manifest& manifest, std::span<const PagePart> parts, unsigned threads,
                std::span<uint8_t> touched, Progress* progress, const Moments& moments = {},
                std::span<const uint8_t> landed = {});

struct CopyRun {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint64_t length = 0;
};

// Copies runs of bytes, none of which overlaps another, on up to `threads` threads, the caller's among them.
void copy_runs(std::span<const CopyRun> runs, unsigned threads);

// Reads pages only to verify them, to the last byte of their padding. Returns every failure.
std::vector<PageFailure> check_pages(Storage& storage, const Manifest& manifest, std::span<const uint32_t> pages,
                                     unsigned threads, Progress* progress);

}  // namespace tierload
