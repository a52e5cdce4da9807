// A look at a small sample of a page, from which the encoder guesses what will pay for each plane.
#pragma once

#include "tierload/storage.h"

namespace tierload {

constexpr size_t sample_items_max = 4096;

// Runs of neighbours, spread evenly over a page, the first at its start and the last at its end.
struct Spread {
  size_t runs;
  size_t run_items;
};
// Long enough that a run costs little more than its cache lines, short enough that a page of many small tensors is seen
// in all its parts.
constexpr Spread sample_spread = {sample_items_max / 64, 64};
// Enough to know random bytes, at a fiftieth of what their digest costs.
constexpr Spread glance_spread = {32, 16};

struct ByteStatistics {
  double entropy_bits;  // order 0, per byte: -Σ p·log2(p); 8 for what looks random
  double top_share;     // how much of the bytes the most frequent value has
};

// Copies items of `raw` to the start of `out`, which has room for them, and returns the part that was filled. All of
// them where `raw` has no more than the spread asks for.
Bytes sample_page(Bytes raw, size_t item_size, Spread spread, MutableBytes out);

// Whether the bytes could be random ones: a guess for a handful of them, far cheaper than count_bytes().
bool looks_random(Bytes bytes);

// `bytes` holds at least one.
ByteStatistics count_bytes(Bytes bytes);

// Whether every byte is the first one; looks at all of them.
bool is_constant(Bytes bytes);

}  // namespace tierload
