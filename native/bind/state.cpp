// Saving a state on the edge to Python: the walk, and the table of chunks that comes out of it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bind/arrays.h"
#include "bind/state_writer.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

// What Python has described itself: chunks of several tensors, of elements that lie apart, of other bytes.
struct MoreChunks {
  std::vector<nb::bytes> keys;
  std::vector<uint8_t> dtypes;
  std::vector<std::vector<int64_t>> sizes;
  std::vector<int64_t> nbytes;
};

// The columns of tierload.types.ChunkTable.
nb::tuple table(const StateWriter& writer, const ChunkOrder& order, const MoreChunks& more) {
  const Leaves& leaves = writer.leaves();
  const size_t count = order.chunks().size();
  std::string keys;
  std::vector<int64_t> key_offsets(count), key_lengths(count), dims_at(count), dims, nbytes(count);
  std::vector<uint8_t> dtypes(count), ndims(count);
  for (size_t chunk = 0; chunk < count; ++chunk) {
    const uint32_t number = order.chunks()[chunk];
    std::span<const int64_t> sizes;
    key_offsets[chunk] = static_cast<int64_t>(keys.size());
    if (number < leaves.count()) {
      keys += leaves.key(number);
      sizes = leaves.sizes(number);
      dtypes[chunk] = leaves[number].dtype;
      nbytes[chunk] = static_cast<int64_t>(leaves[number].bytes);
    } else {
      const size_t i = number - leaves.count();
      keys += as_text(bytes_of(more.keys.at(i)));
      sizes = more.sizes.at(i);
      dtypes[chunk] = more.dtypes.at(i);
      nbytes[chunk] = more.nbytes.at(i);
    }
    key_lengths[chunk] = static_cast<int64_t>(keys.size()) - key_offsets[chunk];
    ndims[chunk] = static_cast<uint8_t>(sizes.size());
    dims_at[chunk] = static_cast<int64_t>(dims.size());
    dims.insert(dims.end(), sizes.begin(), sizes.end());  // shape, offsets, sizes: every chunk is a whole tensor
    dims.resize(dims.size() + sizes.size());
    dims.insert(dims.end(), sizes.begin(), sizes.end());
  }
  return nb::make_tuple(nb::bytes(keys.data(), keys.size()), array_of(std::move(key_offsets)),
                        array_of(std::move(key_lengths)), array_of(std::move(dtypes)), array_of(std::move(ndims)),
                        array_of(std::move(dims_at)), array_of(std::move(dims)), array_of(std::move(nbytes)));
}

// The address of each chunk's bytes.
nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>> pointers(const StateWriter& writer, const ChunkOrder& order,
                                                       const std::vector<uint64_t>& more) {
  std::vector<uint64_t> out;
  for (const uint32_t number : order.chunks()) {
    const size_t leaves = writer.leaves().count();
    out.push_back(number < leaves ? writer.leaves()[number].start : more.at(number - leaves));
  }
  return array_of(std::move(out));
}

// The device in whose memory each chunk's bytes are.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> devices(const StateWriter& writer, const ChunkOrder& order,
                                                     const std::vector<uint8_t>& more) {
  std::vector<uint8_t> out;
  for (const uint32_t number : order.chunks()) {
    const size_t leaves = writer.leaves().count();
    out.push_back(number < leaves ? writer.leaves()[number].device : more.at(number - leaves));
  }
  return array_of(std::move(out));
}

std::vector<std::string> texts_of(const std::vector<nb::bytes>& keys) {
  std::vector<std::string> texts;
  for (const nb::bytes& key : keys) texts.emplace_back(as_text(bytes_of(key)));
  return texts;
}

}  // namespace

void bind_state_writer(nb::module_& module) {
  nb::class_<ChunkOrder>(module, "ChunkOrder", "The chunks of a state, sorted by key.")
      .def_prop_ro("more", &ChunkOrder::more, "The number of chunk of each that is no leaf.")
      .def_prop_ro(
          "twice",
          [](const ChunkOrder& self) -> nb::object {
            return self.twice() ? nb::object(to_bytes(*self.twice())) : nb::none();
          },
          nb::sig("def twice(self) -> bytes | None"), "A key that two chunks have.");

  nb::class_<StateWriter>(module, "StateWriter", "Walks a state that is being saved; see native/bind/state_writer.h.")
      .def(nb::init<const Torch&>(), nb::arg("torch"), nb::keep_alive<1, 2>())
      .def("write", &StateWriter::write, nb::arg("state").none(), nb::arg("root"), nb::arg("encode"))
      .def("met", &StateWriter::met, nb::arg("value").none())
      .def("count", &StateWriter::count)
      .def("append", &StateWriter::append, nb::arg("text"))
      .def("hole", &StateWriter::hole)
      .def_prop_ro("leaves", [](const StateWriter& self) { return self.leaves().count(); })
      .def("leaf", &StateWriter::leaf, nb::arg("number"),
           nb::sig("def leaf(self, number: int) -> tuple[typing.Any, str, int]"))
      .def(
          "shared",
          [](const StateWriter& self, const std::vector<std::pair<uint64_t, uint64_t>>& others) {
            return self.leaves().shared(ranges_of(others));
          },
          nb::arg("others"), "Leaves whose memory another leaf or one of these ranges of addresses uses too.")
      .def(
          "order",
          [](const StateWriter& self, const std::vector<uint32_t>& shared, const std::vector<nb::bytes>& more) {
            return ChunkOrder(self.leaves(), shared, texts_of(more));
          },
          nb::arg("shared"), nb::arg("more"))
      .def(
          "alike",
          [](const StateWriter& self, const StateWriter& other) { return self.leaves().alike(other.leaves()); },
          nb::arg("other"))
      .def("release", &StateWriter::release, nb::sig("def release(self) -> list[object]"))
      .def(
          "table",
          [](const StateWriter& self, const ChunkOrder& order, std::vector<nb::bytes> keys, std::vector<uint8_t> dtypes,
             std::vector<std::vector<int64_t>> sizes, std::vector<int64_t> nbytes) {
            return table(self, order, {std::move(keys), std::move(dtypes), std::move(sizes), std::move(nbytes)});
          },
          nb::arg("order"), nb::arg("keys"), nb::arg("dtypes"), nb::arg("sizes"), nb::arg("nbytes"),
          nb::sig("def table(self, order: ChunkOrder, keys: list[bytes], dtypes: list[int], sizes: list[list[int]], "
                  "nbytes: list[int]) -> tuple"))
      .def("pointers", &pointers, nb::arg("order"), nb::arg("more"))
      .def("devices", &devices, nb::arg("order"), nb::arg("more"))
      .def(
          "document",
          [](StateWriter& self, const ChunkOrder& order, const std::vector<std::pair<uint32_t, nb::str>>& texts) {
            return to_bytes(self.document(order, texts));
          },
          nb::arg("order"), nb::arg("texts"));
}

}  // namespace tierload
