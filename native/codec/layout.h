// The header of an encoded page (docs/FORMAT.md section 7, codec 1), written and read.
#pragma once

#include <array>
#include <span>

#include "codec/frames.h"
#include "tierload/storage.h"

namespace tierload {

constexpr size_t page_bytes_max = size_t{64} << 20;
constexpr size_t item_size_max = 8;

constexpr bool is_item_size(size_t size) { return size == 1 || size == 2 || size == 4 || size == 8; }

// Header and frame table, up to the first plane's stored bytes.
constexpr size_t header_bytes(size_t item_size, size_t frames) { return 4 + 8 * item_size + 4 * frames; }

struct PlaneHeader {
  PlaneKind kind = PlaneKind::raw;
  std::byte constant{};
  uint16_t frames = 0;
  uint32_t stored_bytes = 0;
};

struct PageHeader {
  uint8_t item_size = 1;
  bool rotate = false;
  std::array<PlaneHeader, item_size_max> planes;
};

// `lengths` are those of all frames, plane by plane.
void write_header(const PageHeader& header, std::span<const uint32_t> lengths, MutableBytes out);

// An encoded page taken apart and checked: every part lies inside `stored`, the parts fill it exactly, and kinds,
// frames and lengths fit a page of `raw_bytes`. What is inside the frames is not known yet.
struct PageLayout {
  PageHeader header;
  std::array<Bytes, item_size_max> planes;       // stored bytes
  std::array<Bytes, item_size_max> frame_table;  // 4 bytes a frame; their sum is the plane's stored length
};

// Throws CorruptError.
PageLayout read_layout(Bytes stored, size_t item_size, size_t raw_bytes);

uint32_t frame_length(Bytes frame_table, size_t frame);

}  // namespace tierload
