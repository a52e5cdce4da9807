// Decoding of one page. The input is hostile until proven otherwise: read_layout() bounds every part of it, and
// FrameCoder::decode() every frame, before a byte of it is used.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "codec/layout.h"
#include "codec/planes.h"
#include "codec/scratch.h"
#include "tierload/error.h"

namespace tierload {
namespace {

// Hands out a plane's frames in order.
class FrameReader {
 public:
  FrameReader(Bytes plane, Bytes table) : rest_(plane), table_(table) {}
  Bytes next() {
    const Bytes frame = rest_.first(frame_length(table_, frame_));
    rest_ = rest_.subspan(frame.size());
    ++frame_;
    return frame;
  }

 private:
  Bytes rest_;
  Bytes table_;
  size_t frame_ = 0;
};

// 128 KiB of every plane at a time: what the frames give is merged while it is still in the cache, and the scratch is
// small whatever the page.
void decode_planes(Bytes stored, size_t item_size, MutableBytes raw, CodecScratch::Impl& scratch) {
  const PageLayout layout = read_layout(stored, item_size, raw.size());
  std::array<PlaneSource, item_size_max> sources;
  std::array<FrameReader, item_size_max> frames = [&]<size_t... p>(std::index_sequence<p...>) {
    return std::array{FrameReader(layout.planes[p], layout.frame_table[p])...};
  }(std::make_index_sequence<item_size_max>());
  const MutableBytes room = scratch.frames.reserve(item_size * frame_bytes);

  const size_t plane_bytes = raw.size() / item_size;
  for (size_t frame = 0; frame < frame_count(plane_bytes); ++frame) {
    const size_t from = frame * frame_bytes;
    const size_t items = std::min(frame_bytes, plane_bytes - from);
    const MutableBytes target = raw.subspan(from * item_size, items * item_size);
    for (size_t p = 0; p < item_size; ++p) {
      const PlaneHeader& plane = layout.header.planes[p];
      switch (plane.kind) {
        case PlaneKind::constant:
          sources[p] = {nullptr, plane.constant};
          break;
        case PlaneKind::raw:
          sources[p] = {layout.planes[p].data() + from, {}};
          break;
        case PlaneKind::lz4:
        case PlaneKind::zstd:
          // A single plane needs no merge.
          const MutableBytes decoded = item_size == 1 ? target : room.subspan(p * frame_bytes, items);
          scratch.coder.decode(plane.kind, frames[p].next(), decoded, {p, frame});
          sources[p] = {decoded.data(), {}};
      }
    }
    merge_planes(std::span(sources).first(item_size), layout.header.rotate, target);
  }
}

}  // namespace

void decode_page(Bytes stored, Codec codec, uint8_t item_size, MutableBytes raw, CodecScratch& scratch) {
  switch (codec) {
    case Codec::raw:
      if (stored.size() != raw.size()) {
        throw CorruptError("raw page: " + std::to_string(stored.size()) + " bytes, not " + std::to_string(raw.size()));
      }
      if (!raw.empty()) std::memcpy(raw.data(), stored.data(), raw.size());
      return;
    case Codec::planes:
      decode_planes(stored, item_size, raw, *scratch.impl);
      return;
  }
  throw CorruptError("page of unknown codec " + std::to_string(static_cast<unsigned>(codec)));
}

}  // namespace tierload
