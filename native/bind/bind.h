// The edge to Python. Nothing below this room knows of it: the GIL is released here, errors become exceptions here.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tierload/catalog.h"
#include "tierload/engine.h"

namespace tierload {

namespace nb = nanobind;

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Read-only bytes of a numpy array; Python gives them their row type.
using ByteArray = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;

template <typename T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), array.size()};
}

// Rows that Python laid out with numpy, as docs/FORMAT.md says. They are copied, since bytes may not be aligned.
template <typename T>
std::vector<T> rows_of(const Array<uint8_t>& array) {
  if (array.size() % sizeof(T) != 0) throw UsageError("rows of " + std::to_string(sizeof(T)) + " bytes are cut short");
  std::vector<T> rows(array.size() / sizeof(T));
  if (!rows.empty()) std::memcpy(rows.data(), array.data(), array.size());
  return rows;
}

inline Bytes bytes_of(const nb::bytes& value) { return {static_cast<const std::byte*>(value.data()), value.size()}; }
inline nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

// A manifest, and the storage that its pages are read from.
struct ManifestView {
  std::shared_ptr<Storage> storage;
  std::unique_ptr<Manifest> manifest;
};

// Pairs of an accelerator's number and a stream's handle.
using StreamPairs = std::vector<std::pair<uint8_t, uint64_t>>;

inline Moments moments_now(const StreamPairs& pairs) {
  std::vector<DeviceStream> streams;
  for (const auto& [device, stream] : pairs) streams.push_back({device, stream});
  return moments_of(streams);
}

void bind_accelerators(nb::module_& module);
void bind_errors();
void bind_manifest(nb::module_& module);
void bind_store(nb::module_& module);
void bind_faults(nb::module_& module);
void bind_codec(nb::module_& module);
void bind_device(nb::module_& module);
void bind_arrivals(nb::module_& module);
void bind_ending(nb::module_& module);
void bind_locking(nb::module_& module);

}  // namespace tierload
