#include "codec/entropy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace tierload {

namespace {

using Counts = std::array<uint32_t, 256>;

// Into several tables in turn where neighbours may be equal: each would wait for the one before it.
template <size_t tables>
Counts count(Bytes bytes) {
  std::array<Counts, tables> counts{};
  for (size_t i = 0; i < bytes.size(); ++i) ++counts[i % tables][std::to_integer<size_t>(bytes[i])];
  for (size_t table = 1; table < tables; ++table) {
    for (size_t value = 0; value < 256; ++value) counts[0][value] += counts[table][value];
  }
  return counts[0];
}

// Whether two of `total` bytes are equal hardly more often than random ones: those in 1 of 256 cases, and of 512 of
// them one sample in 3000 is 15% above that. The entropy is then 7.8 bits or more, up to the error of the sample.
bool looks_random(const Counts& counts, uint64_t total) {
  uint64_t pairs = 0;
  for (const uint32_t count : counts) pairs += uint64_t{count} * count;
  return (pairs - total) * 256 * 20 <= total * (total - 1) * 23;
}

}  // namespace

Bytes sample_page(Bytes raw, size_t item_size, Spread spread, MutableBytes out) {
  const size_t items = raw.size() / item_size;
  if (items <= spread.runs * spread.run_items) {
    std::memcpy(out.data(), raw.data(), items * item_size);
    return out.first(items * item_size);
  }
  const size_t run_bytes = spread.run_items * item_size;
  for (size_t run = 0; run < spread.runs; ++run) {
    const size_t item = (items - spread.run_items) * run / (spread.runs - 1);
    std::memcpy(out.data() + run * run_bytes, raw.data() + item * item_size, run_bytes);
  }
  return out.first(spread.runs * run_bytes);
}

bool looks_random(Bytes bytes) { return looks_random(count<1>(bytes), bytes.size()); }

ByteStatistics count_bytes(Bytes bytes) {
  const Counts counts = count<4>(bytes);
  const double total = static_cast<double>(bytes.size());
  const double top = *std::ranges::max_element(counts);
  if (looks_random(counts, bytes.size())) return {8, top / total};
  double sum = 0;
  for (const uint32_t count : counts) {
    if (count != 0) sum += count * std::log2(count);
  }
  return {std::log2(total) - sum / total, top / total};
}

bool is_constant(Bytes bytes) {
  // Every byte equals its successor; memcmp stops at the first that does not.
  return bytes.size() < 2 || std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

}  // namespace tierload
