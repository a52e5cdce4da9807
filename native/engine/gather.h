// Elements with gaps between them, read as if they were packed.
#pragma once

#include "tierload/engine.h"

namespace tierload {

// Copies bytes [from, from + into.size()) of the view's elements, packed in the order of its dimensions.
// `from` and the size are multiples of the item size, and the range lies within the view.
void gather(const StridedView& view, const std::byte* base, uint64_t from, MutableBytes into);

// A page's raw bytes: where they are when they lie together, else in `gathered`, which is overwritten.
Bytes raw_bytes(const PageSource& source, std::vector<std::byte>& gathered);

}  // namespace tierload
