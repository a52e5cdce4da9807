#include "codec/entropy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace tierload {

// Runs of this many items: long enough that a run costs little more than its cache lines, short enough that a page of
// many small tensors is seen in all its parts.
constexpr size_t run_items = 64;

Bytes sample_page(Bytes raw, size_t item_size, MutableBytes out) {
  const size_t items = raw.size() / item_size;
  if (items <= sample_items_max) {
    std::memcpy(out.data(), raw.data(), items * item_size);
    return out.first(items * item_size);
  }
  constexpr size_t runs = sample_items_max / run_items;
  const size_t run_bytes = run_items * item_size;
  for (size_t run = 0; run < runs; ++run) {
    const size_t item = (items - run_items) * run / (runs - 1);  // the first run at the start, the last at the end
    std::memcpy(out.data() + run * run_bytes, raw.data() + item * item_size, run_bytes);
  }
  return out.first(runs * run_bytes);
}

ByteStatistics count_bytes(Bytes bytes) {
  // Four tables: equal neighbours, the common case in an exponent plane, would otherwise wait for each other.
  std::array<std::array<uint32_t, 256>, 4> counts{};
  for (size_t i = 0; i < bytes.size(); ++i) ++counts[i & 3][std::to_integer<size_t>(bytes[i])];
  double sum = 0;
  uint32_t top = 0;
  for (size_t value = 0; value < 256; ++value) {
    const uint32_t count = counts[0][value] + counts[1][value] + counts[2][value] + counts[3][value];
    if (count == 0) continue;
    top = std::max(top, count);
    sum += count * std::log2(count);
  }
  const double total = static_cast<double>(bytes.size());
  return {std::log2(total) - sum / total, top / total};
}

bool is_constant(Bytes bytes) {
  // Every byte equals its successor; memcmp stops at the first that does not.
  return bytes.size() < 2 || std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

}  // namespace tierload
