// Columns of numbers for Python.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "state/leaves.h"

namespace tierload {

// Pairs of addresses, from the first byte to the one after the last.
inline std::vector<MemoryRange> ranges_of(const std::vector<std::pair<uint64_t, uint64_t>>& pairs) {
  std::vector<MemoryRange> ranges;
  for (const auto& [start, end] : pairs) ranges.push_back({start, end});
  return ranges;
}

// A numpy array that owns what was in the vector.
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> array_of(std::vector<T>&& column) {
  auto kept = std::make_unique<std::vector<T>>(std::move(column));
  const nb::capsule owner(kept.get(), [](void* column_at) noexcept { delete static_cast<std::vector<T>*>(column_at); });
  std::vector<T>& numbers = *kept.release();
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(numbers.data(), {numbers.size()}, owner);
}

}  // namespace tierload
