// A plane as frames of 128 KiB, LZ4 or zstd (docs/FORMAT.md section 7), and the library contexts that make them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tierload/storage.h"

namespace tierload {

enum class PlaneKind : uint8_t { raw = 0, constant = 1, lz4 = 2, zstd = 3 };

constexpr size_t frame_bytes = 128 * 1024;

constexpr size_t frame_count(size_t plane_bytes) { return (plane_bytes + frame_bytes - 1) / frame_bytes; }

// How a plane is compressed. Readers see only the kind.
enum class Method {
  lz4,       // LZ4: long runs and repeats, at several GB/s in both directions
  huffman,   // zstd that all but never looks for repeats: exponents, whose matches are accidents that cost more
  search,    // zstd level 1: bytes with real repeats
  thorough,  // zstd level 6, for Compression::small: beyond it 128 KiB frames gain 5% and lose 90% of the speed
};

constexpr PlaneKind kind_of(Method method) { return method == Method::lz4 ? PlaneKind::lz4 : PlaneKind::zstd; }

// Which frame of a page is being decoded, for messages.
struct FramePosition {
  size_t plane;
  size_t frame;
};

class FrameCoder {
 public:
  FrameCoder();
  ~FrameCoder();
  FrameCoder(const FrameCoder&) = delete;
  FrameCoder& operator=(const FrameCoder&) = delete;

  // Compresses `plane` to the start of `out` and appends the frames' lengths to `lengths`. When `out` is too small,
  // returns nothing and leaves `lengths` as it was. Returns the sum of the lengths.
  std::optional<size_t> encode(Method method, Bytes plane, MutableBytes out, std::vector<uint32_t>& lengths);

  // Decodes one frame into exactly `out`; `kind` is lz4 or zstd. Throws CorruptError.
  void decode(PlaneKind kind, Bytes frame, MutableBytes out, FramePosition position);

 private:
  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
};

}  // namespace tierload
