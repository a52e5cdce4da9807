// Byte planes of a page (docs/FORMAT.md section 7, codec 1): plane p holds byte p of every item.
#pragma once

#include "tierload/storage.h"

namespace tierload {

// One plane to merge: bytes where they already lie, or one value for all of it, which needs no memory.
struct PlaneSource {
  const std::byte* bytes = nullptr;  // nullptr: every byte is `constant`
  std::byte constant{};
};

// Splits items of planes.size() ∈ {1, 2, 4, 8} bytes; each plane has room for raw.size() / planes.size() bytes and
// overlaps neither `raw` nor another plane. `rotate` rotates the upper 16 bits of every item left by one (a float's
// sign moves to bit 0, its exponent into the top byte); it needs at least two planes.
void split_planes(Bytes raw, bool rotate, std::span<std::byte* const> planes);

// The reverse, straight into `raw`. A plane that is alone may already lie there.
void merge_planes(std::span<const PlaneSource> planes, bool rotate, MutableBytes raw);

}  // namespace tierload
