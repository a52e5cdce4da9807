#include "bind/tensor_table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bind/arrays.h"
#include "bind/nodes.h"
#include "bind/texts.h"
#include "state/leaves.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

constexpr int64_t large_bytes = 1 << 20;  // such tensors are few, and where memory is short Python names the key

template <typename T>
std::vector<T> column(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

}  // namespace

TensorTable::TensorTable(const Torch& torch, const nb::object& empty_like, const Array<uint8_t>& dtypes,
                         const Array<uint8_t>& ndims, const Array<int64_t>& dims_at, const Array<int64_t>& dims,
                         const Array<int64_t>& nbytes)
    : torch_(torch),
      empty_like_(empty_like),
      dtypes_(column(dtypes)),
      ndims_(column(ndims)),
      dims_at_(column(dims_at)),
      dims_(column(dims)),
      nbytes_(column(nbytes)),
      states_(nbytes_.size(), State::free),
      tensors_(nbytes_.size()),
      devices_(nbytes_.size(), 0) {
  if (dtypes_.size() != nbytes_.size() || ndims_.size() != nbytes_.size() || dims_at_.size() != nbytes_.size()) {
    throw UsageError("the columns of chunks differ in length");
  }
}

std::span<const int64_t> TensorTable::sizes(uint64_t chunk) const {
  return std::span(dims_).subspan(static_cast<size_t>(dims_at_[chunk]), ndims_[chunk]);
}

// Whether a chunk is a whole tensor of a dtype that torch has, with elements, and agrees with itself.
bool TensorTable::is_whole(uint64_t chunk) const {
  const DtypeRow* row = torch_.row_of_code(dtypes_[chunk]);
  const uint64_t ndim = ndims_[chunk];
  if (row == nullptr || nbytes_[chunk] <= 0 || dims_at_[chunk] < 0) return false;
  if (static_cast<uint64_t>(dims_at_[chunk]) > dims_.size() ||
      dims_.size() - static_cast<uint64_t>(dims_at_[chunk]) < 3 * ndim) {
    return false;
  }
  const int64_t* shape = dims_.data() + dims_at_[chunk];
  int64_t bytes = row->bytes;
  for (uint64_t dim = 0; dim < ndim; ++dim) {
    const int64_t size = shape[2 * ndim + dim];
    if (size != shape[dim] || shape[ndim + dim] != 0 || size <= 0) return false;
    if (__builtin_mul_overflow(bytes, size, &bytes)) return false;
  }
  return bytes == nbytes_[chunk];
}

// The chunk of a node {"t":{"chunk":…,"shape":[…]}} that is the whole chunk.
std::optional<uint64_t> TensorTable::plain_node(PyObject* node) const {
  // They are never destroyed: there may be no interpreter any more when statics are.
  static PyObject* const t = PyUnicode_InternFromString("t");
  static PyObject* const chunk_name = PyUnicode_InternFromString("chunk");
  static PyObject* const shape_name = PyUnicode_InternFromString("shape");
  if (!PyDict_CheckExact(node) || PyDict_GET_SIZE(node) != 1) return std::nullopt;
  PyObject* content = PyDict_GetItemWithError(node, t);
  if (content == nullptr || !PyDict_CheckExact(content) || PyDict_GET_SIZE(content) != 2) return std::nullopt;
  PyObject* number = PyDict_GetItemWithError(content, chunk_name);
  PyObject* shape = PyDict_GetItemWithError(content, shape_name);
  if (number == nullptr || shape == nullptr || !PyList_CheckExact(shape)) return std::nullopt;
  const auto chunk = small_integer(number);
  if (!chunk || *chunk < 0 || static_cast<uint64_t>(*chunk) >= nbytes_.size()) return std::nullopt;
  const auto at = static_cast<uint64_t>(*chunk);
  if (!is_whole(at) || static_cast<size_t>(PyList_GET_SIZE(shape)) != ndims_[at]) return std::nullopt;
  Py_ssize_t dim = 0;
  for (const int64_t size : sizes(at)) {
    if (small_integer(PyList_GET_ITEM(shape, dim++)) != size) return std::nullopt;
  }
  return at;
}

nb::object TensorTable::whole(uint64_t chunk, const nb::callable& make) {
  if (chunk >= nbytes_.size()) return nb::none();
  unbind(chunk);
  if (states_[chunk] == State::whole) return tensors_[chunk];
  if (states_[chunk] != State::free || !is_whole(chunk)) return nb::none();
  std::string kind(1, static_cast<char>(dtypes_[chunk]));
  kind += as_text(std::as_bytes(sizes(chunk)));
  nb::object& prototype = prototypes_[kind];
  if (prototype.is_valid()) {
    PyObject* argument = prototype.ptr();
    tensors_[chunk] = nb::steal(PyObject_Vectorcall(empty_like_.ptr(), &argument, 1, nullptr));
    if (!tensors_[chunk].is_valid()) throw nb::python_error();
  } else {
    nb::list shape;
    for (const int64_t size : sizes(chunk)) shape.append(size);
    tensors_[chunk] = prototype = make(dtypes_[chunk], shape);
  }
  states_[chunk] = State::whole;
  return tensors_[chunk];
}

nb::object TensorTable::get(uint64_t chunk) {
  if (chunk >= tensors_.size()) return nb::none();
  unbind(chunk);
  return tensors_[chunk].is_valid() ? tensors_[chunk] : nb::none();
}

void TensorTable::put(uint64_t chunk, const nb::object& tensor) {
  if (chunk >= tensors_.size()) throw UsageError("there is no chunk " + std::to_string(chunk));
  unbind(chunk);
  states_[chunk] = State::other;
  tensors_[chunk] = tensor.is_none() ? nb::object() : tensor;
}

// Whether a node is its own value, or a tensor that can be made here.
bool TensorTable::member(PyObject* node, nb::object& value, const nb::callable& make) {
  if (is_scalar(node)) {
    value = nb::borrow(node);
    return true;
  }
  const auto chunk = plain_node(node);
  value = chunk && nbytes_[*chunk] < large_bytes ? whole(*chunk, make) : nb::none();
  return !value.is_none();
}

nb::list TensorTable::fill_dict(const nb::dict& nodes, const nb::dict& into, const nb::callable& make) {
  nb::list rest;
  nb::object value;
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* node = nullptr;
  while (PyDict_Next(nodes.ptr(), &at, &key, &node)) {
    if (!member(node, value, make)) rest.append(nb::make_tuple(nb::borrow(key), nb::borrow(node)));
    if (PyDict_SetItem(into.ptr(), key, value.ptr()) != 0) throw nb::python_error();
  }
  return rest;
}

nb::list TensorTable::fill_list(const nb::list& nodes, const nb::list& into, const nb::callable& make) {
  nb::list rest;
  nb::object value;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes.ptr()); ++i) {
    PyObject* node = PyList_GET_ITEM(nodes.ptr(), i);
    if (!member(node, value, make)) rest.append(nb::make_tuple(i, nb::borrow(node)));
    if (PyList_Append(into.ptr(), value.ptr()) != 0) throw nb::python_error();
  }
  return rest;
}

std::optional<nb::list> TensorTable::fill_pairs(const nb::list& pairs, const nb::object& into,
                                                const nb::callable& make) {
  for (const nb::handle pair : pairs) {
    if (!PyList_CheckExact(pair.ptr()) || PyList_GET_SIZE(pair.ptr()) != 2) return std::nullopt;
    if (!is_scalar(PyList_GET_ITEM(pair.ptr(), 0))) return std::nullopt;
  }
  nb::list rest;
  nb::object value;
  for (const nb::handle pair : pairs) {
    const nb::handle key = PyList_GET_ITEM(pair.ptr(), 0);
    const nb::handle node = PyList_GET_ITEM(pair.ptr(), 1);
    if (!member(node.ptr(), value, make)) rest.append(nb::make_tuple(key, node));
    const size_t before = nb::len(into);
    if (PyObject_SetItem(into.ptr(), key.ptr(), value.ptr()) != 0) throw nb::python_error();
    if (nb::len(into) == before) throw CorruptError("the state document has a key of a dict twice");
  }
  return rest;
}

nb::list TensorTable::bind(const nb::object& live, const nb::dict& nodes) {
  nb::list rest;
  // As Python would: a dict may be of a type that has its own ideas of keys and values.
  const nb::object keys = nb::steal(PySequence_List(live.ptr()));
  if (!keys.is_valid()) throw nb::python_error();
  for (const nb::handle key : nb::borrow<nb::list>(keys)) {
    const nb::object value = nb::steal(PyObject_GetItem(live.ptr(), key.ptr()));
    if (!value.is_valid()) throw nb::python_error();
    PyObject* tensor = value.ptr();
    PyObject* node = torch_.is_tensor(tensor) ? PyDict_GetItemWithError(nodes.ptr(), key.ptr()) : nullptr;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    const auto chunk = node == nullptr ? std::nullopt : plain_node(node);
    const auto plain = chunk && states_[*chunk] == State::free ? torch_.plain(tensor) : std::nullopt;
    if (!plain || plain->dtype->code != dtypes_[*chunk] || (plain->marks & (mark_conj | mark_neg)) != 0 ||
        !std::ranges::equal(plain->shape, sizes(*chunk))) {
      rest.append(key);
      continue;
    }
    states_[*chunk] = State::bound;
    tensors_[*chunk] = value;
    devices_[*chunk] = plain->device;
  }
  return rest;
}

void TensorTable::unbind(uint64_t chunk) {
  if (states_[chunk] != State::bound) return;
  unbound_.append(nb::make_tuple(chunk, tensors_[chunk]));
  states_[chunk] = State::free;
  tensors_[chunk] = nb::object();
  devices_[chunk] = 0;
}

nb::list TensorTable::unbind(const std::vector<uint64_t>& chunks, std::span<const MemoryRange> others) {
  std::vector<uint64_t> bound;
  std::vector<MemoryRange> ranges;
  for (uint64_t chunk = 0; chunk < tensors_.size(); ++chunk) {
    if (states_[chunk] != State::bound) continue;
    const uint64_t start = torch_.address(tensors_[chunk].ptr());
    bound.push_back(chunk);
    ranges.push_back({start, start + static_cast<uint64_t>(nbytes_[chunk])});
  }
  for (const uint32_t number : meeting(ranges, others)) unbind(bound[number]);
  for (const uint64_t chunk : chunks) unbind(chunk);
  return unbound_;
}

nb::tuple TensorTable::owners(bool of_target) const {
  std::vector<int64_t> chunks;
  std::vector<uint64_t> pointers;
  std::vector<uint8_t> devices;
  nb::list owners;
  for (size_t chunk = 0; chunk < tensors_.size(); ++chunk) {
    if (!tensors_[chunk].is_valid() || (states_[chunk] == State::bound) != of_target) continue;
    chunks.push_back(static_cast<int64_t>(chunk));
    pointers.push_back(torch_.address(tensors_[chunk].ptr()));
    devices.push_back(devices_[chunk]);
    owners.append(tensors_[chunk]);
  }
  return nb::make_tuple(array_of(std::move(chunks)), array_of(std::move(pointers)), array_of(std::move(devices)),
                        owners);
}

nb::tuple TensorTable::made() const { return owners(false); }
nb::tuple TensorTable::bound() const { return owners(true); }

void bind_tensor_table(nb::module_& module) {
  nb::class_<TensorTable>(module, "TensorTable", "Chunks, and tensors for them; see native/bind/tensor_table.h.")
      .def(nb::init<const Torch&, const nb::object&, const Array<uint8_t>&, const Array<uint8_t>&,
                    const Array<int64_t>&, const Array<int64_t>&, const Array<int64_t>&>(),
           nb::arg("torch"), nb::arg("empty_like"), nb::arg("dtypes"), nb::arg("ndims"), nb::arg("dims_at"),
           nb::arg("dims"), nb::arg("nbytes"), nb::keep_alive<1, 2>())
      .def("fill_dict", &TensorTable::fill_dict, nb::arg("nodes"), nb::arg("into"), nb::arg("make"))
      .def("fill_list", &TensorTable::fill_list, nb::arg("nodes"), nb::arg("into"), nb::arg("make"))
      .def("fill_pairs", &TensorTable::fill_pairs, nb::arg("pairs"), nb::arg("into"), nb::arg("make"))
      .def("bind", &TensorTable::bind, nb::arg("live"), nb::arg("nodes"))
      .def(
          "unbind",
          [](TensorTable& self, const std::vector<uint64_t>& chunks,
             const std::vector<std::pair<uint64_t, uint64_t>>& others) {
            return self.unbind(chunks, ranges_of(others));
          },
          nb::arg("chunks"), nb::arg("others"),
          nb::sig("def unbind(self, chunks: list[int], others: list[tuple[int, int]]) -> list[tuple[int, typing.Any]]"))
      .def("whole", &TensorTable::whole, nb::arg("chunk"), nb::arg("make"))
      .def("get", &TensorTable::get, nb::arg("chunk"))
      .def("put", &TensorTable::put, nb::arg("chunk"), nb::arg("tensor").none())
      .def("made", &TensorTable::made,
           nb::sig("def made(self) -> tuple[numpy.typing.NDArray[numpy.int64], "
                   "numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8], list[object]]"))
      .def("bound", &TensorTable::bound,
           nb::sig("def bound(self) -> tuple[numpy.typing.NDArray[numpy.int64], "
                   "numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8], list[object]]"));
  module.def(
      "parse_nodes", [](const nb::bytes& document) { return parse_nodes(as_text(bytes_of(document))); },
      nb::arg("document"), nb::sig("def parse_nodes(document: bytes) -> object"),
      "A JSON text in ASCII as dicts, lists and scalars; see native/bind/nodes.h.");
  module.def("inner_nodes", &inner_nodes, nb::arg("container"),
             nb::sig("def inner_nodes(container: dict[str, object] | list[object]) -> list[tuple[object, object]]"),
             "Key or index, and node, of the members that may hold others.");
}

}  // namespace tierload
