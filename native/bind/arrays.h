// Columns of numbers for Python.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "bind/bind.h"

namespace tierload {

// A numpy array that owns what was in the vector.
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> array_of(std::vector<T>&& column) {
  auto kept = std::make_unique<std::vector<T>>(std::move(column));
  const nb::capsule owner(kept.get(), [](void* column_at) noexcept { delete static_cast<std::vector<T>*>(column_at); });
  std::vector<T>& numbers = *kept.release();
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(numbers.data(), {numbers.size()}, owner);
}

}  // namespace tierload
