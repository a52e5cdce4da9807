// A look at a small sample of a page, from which the encoder guesses what will pay for each plane.
#pragma once

#include "tierload/storage.h"

namespace tierload {

constexpr size_t sample_items_max = 4096;

struct ByteStatistics {
  double entropy_bits;  // order 0, per byte: -Σ p·log2(p)
  double top_share;     // how much of the bytes the most frequent value has
};

// Copies up to sample_items_max items, short runs spread evenly over all of `raw`, to the start of `out` (which has
// room for them) and returns the part that was filled.
Bytes sample_page(Bytes raw, size_t item_size, MutableBytes out);

// `bytes` holds at least one.
ByteStatistics count_bytes(Bytes bytes);

// Whether every byte is the first one; looks at all of them.
bool is_constant(Bytes bytes);

}  // namespace tierload
