// What the core asks torch about a tensor. Nothing links against torch: it hands out the functions of DLPack's exchange
// interface, and what those do not say is asked by attribute.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bind/bind.h"

namespace tierload {

// A row of the table of dtypes (docs/FORMAT.md section 6).
struct DtypeRow {
  nb::object dtype;
  uint8_t code;
  uint8_t bytes;  // of an element
  bool floating;
  bool complex;
  uint32_t exchanged =
      0;  // what DLPack calls it; 0 until a tensor of this dtype has been seen, and for those that share it
};

// A tensor with elements that lie together in memory that the core reaches: the processor's, or an accelerator's.
struct PlainTensor {
  const void* data;
  std::span<const int64_t> shape;  // valid while the tensor lives
  const DtypeRow* dtype;
  uint64_t bytes;
  uint8_t marks;   // enum Mark
  uint8_t device;  // the number of the accelerator (tierload/accelerator.h); 0: the processor
};

// Where the elements of such a tensor lie.
struct PlainRange {
  uint64_t start;
  uint64_t end;
  uint8_t device;
};

class Torch {
 public:
  // `exchange` is torch.Tensor's capsule, or None where torch has none: then no tensor is plain.
  Torch(nb::type_object tensor, nb::type_object parameter, const nb::list& dtypes, const nb::object& exchange);

  // Exact types only: a subclass may mean something else by its elements.
  bool is_tensor(PyObject* value) const { return Py_TYPE(value) == tensor_type_ || Py_TYPE(value) == parameter_type_; }
  bool is_parameter(PyObject* value) const { return Py_TYPE(value) == parameter_type_; }
  // Nothing for a tensor that is not plain. Asks no code of the user's. `detached`: what detach() would give.
  std::optional<PlainTensor> plain(PyObject* tensor, bool detached = false) const;
  // The same, as far as memory goes. Cheaper.
  std::optional<PlainRange> range(PyObject* tensor) const;
  // Whether a tensor came out of operations that it keeps for its gradient.
  bool has_graph(PyObject* tensor) const;
  // The address of the first element of any tensor.
  uint64_t address(PyObject* tensor) const;
  // The row of a code; null when this torch lacks its dtype.
  const DtypeRow* row_of_code(uint64_t code) const;

 private:
  struct Exchange;
  const DtypeRow* row_of(PyObject* tensor, uint8_t kind, uint8_t bits) const;
  bool answer(const nb::object& method, PyObject* tensor) const;
  nb::object attribute(const nb::object& getter, PyObject* tensor) const;

  nb::object tensor_, parameter_;
  PyTypeObject* tensor_type_;
  PyTypeObject* parameter_type_;
  mutable std::vector<DtypeRow> rows_;
  mutable const DtypeRow* last_ = nullptr;  // most tensors have the dtype of the one before
  nb::object capsule_;
  const Exchange* exchange_ = nullptr;
  nb::object is_conj_, is_neg_;                 // methods of torch.Tensor
  nb::object dtype_, requires_grad_, grad_fn_;  // its descriptors
};

void bind_torch(nb::module_& module);

}  // namespace tierload
