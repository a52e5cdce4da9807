#include "codec/layout.h"

#include <bit>
#include <cstring>
#include <string>

#include "tierload/error.h"

namespace tierload {

static_assert(std::endian::native == std::endian::little, "fields are copied as they lie in memory");

namespace {

struct StoredPlaneHeader {
  uint8_t kind;
  uint8_t constant;
  uint16_t frames;
  uint32_t stored_bytes;
};
static_assert(sizeof(StoredPlaneHeader) == 8);

[[noreturn]] void refuse(const std::string& found) { throw CorruptError("encoded page: " + found); }

[[noreturn]] void refuse(size_t plane, const std::string& found) {
  refuse("plane " + std::to_string(plane) + " " + found);
}

PlaneHeader read_plane_header(Bytes at, size_t plane, size_t plane_bytes) {
  StoredPlaneHeader stored;
  std::memcpy(&stored, at.data(), sizeof stored);
  if (stored.kind > static_cast<uint8_t>(PlaneKind::zstd)) refuse(plane, "is of kind " + std::to_string(stored.kind));
  const auto kind = static_cast<PlaneKind>(stored.kind);
  const bool framed = kind == PlaneKind::lz4 || kind == PlaneKind::zstd;
  const size_t frames = framed ? frame_count(plane_bytes) : 0;
  if (stored.frames != frames) {
    refuse(plane, "has " + std::to_string(stored.frames) + " frames, not " + std::to_string(frames));
  }
  const size_t unframed_bytes = kind == PlaneKind::raw ? plane_bytes : 0;
  if (!framed && stored.stored_bytes != unframed_bytes) {
    refuse(plane, "has " + std::to_string(stored.stored_bytes) + " bytes, not " + std::to_string(unframed_bytes));
  }
  return {kind, std::byte{stored.constant}, stored.frames, stored.stored_bytes};
}

void check_frames(Bytes table, size_t plane, uint32_t stored_bytes) {
  uint64_t sum = 0;
  for (size_t frame = 0; frame < table.size() / 4; ++frame) sum += frame_length(table, frame);
  if (sum != stored_bytes) {
    refuse(plane, "has " + std::to_string(stored_bytes) + " bytes, but its frames have " + std::to_string(sum));
  }
}

}  // namespace

void write_header(const PageHeader& header, std::span<const uint32_t> lengths, MutableBytes out) {
  std::byte* at = out.data();
  const std::array<uint8_t, 4> start = {header.item_size, static_cast<uint8_t>(header.rotate ? 1 : 0), 0, 0};
  std::memcpy(at, start.data(), start.size());
  at += start.size();
  for (size_t p = 0; p < header.item_size; ++p) {
    const PlaneHeader& plane = header.planes[p];
    const StoredPlaneHeader stored = {static_cast<uint8_t>(plane.kind), std::to_integer<uint8_t>(plane.constant),
                                      plane.frames, plane.stored_bytes};
    std::memcpy(at, &stored, sizeof stored);
    at += sizeof stored;
  }
  if (!lengths.empty()) std::memcpy(at, lengths.data(), lengths.size_bytes());
}

PageLayout read_layout(Bytes stored, size_t item_size, size_t raw_bytes) {
  if (!is_item_size(item_size)) refuse("item size " + std::to_string(item_size));
  if (raw_bytes > page_bytes_max) refuse(std::to_string(raw_bytes) + " raw bytes are too many");
  if (raw_bytes % item_size != 0) {
    refuse(std::to_string(raw_bytes) + " raw bytes are no multiple of item size " + std::to_string(item_size));
  }
  if (stored.size() < header_bytes(item_size, 0)) refuse("ends in its header, after " + std::to_string(stored.size()));
  const auto found_size = std::to_integer<size_t>(stored[0]);
  const auto transform = std::to_integer<unsigned>(stored[1]);
  if (found_size != item_size) {
    refuse("item size " + std::to_string(found_size) + ", not " + std::to_string(item_size));
  }
  if (transform > 1 || (transform == 1 && item_size == 1)) {
    refuse("transform " + std::to_string(transform) + " of item size " + std::to_string(item_size));
  }

  PageLayout layout;
  layout.header.item_size = static_cast<uint8_t>(item_size);
  layout.header.rotate = transform == 1;
  size_t frames = 0;
  size_t size = 0;  // at most 8 · 2³²
  for (size_t p = 0; p < item_size; ++p) {
    layout.header.planes[p] = read_plane_header(stored.subspan(4 + 8 * p, 8), p, raw_bytes / item_size);
    frames += layout.header.planes[p].frames;
    size += layout.header.planes[p].stored_bytes;
  }
  size += header_bytes(item_size, frames);
  if (size != stored.size()) {
    refuse("its parts have " + std::to_string(size) + " bytes, it has " + std::to_string(stored.size()));
  }

  size_t table_at = header_bytes(item_size, 0);
  size_t plane_at = header_bytes(item_size, frames);
  for (size_t p = 0; p < item_size; ++p) {
    const PlaneHeader& plane = layout.header.planes[p];
    layout.frame_table[p] = stored.subspan(table_at, size_t{4} * plane.frames);
    layout.planes[p] = stored.subspan(plane_at, plane.stored_bytes);
    table_at += layout.frame_table[p].size();
    plane_at += plane.stored_bytes;
    if (plane.frames != 0) check_frames(layout.frame_table[p], p, plane.stored_bytes);
  }
  return layout;
}

uint32_t frame_length(Bytes frame_table, size_t frame) {
  uint32_t length;
  std::memcpy(&length, frame_table.subspan(4 * frame, 4).data(), 4);
  return length;
}

}  // namespace tierload
