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
};

// A tensor with elements that lie together in the memory of the processor.
struct PlainTensor {
  const void* data;
  std::span<const int64_t> shape;  // valid while the tensor lives
  const DtypeRow* dtype;
  uint64_t bytes;
  uint8_t marks;  // enum Mark
};

class Torch {
 public:
  // `exchange` is torch.Tensor's capsule, or None where torch has none: then no tensor is plain.
  Torch(nb::type_object tensor, nb::type_object parameter, const nb::list& dtypes, const nb::object& exchange);

  // Exact types only: a subclass may mean something else by its elements.
  bool is_tensor(PyObject* value) const { return Py_TYPE(value) == tensor_type_ || Py_TYPE(value) == parameter_type_; }
  // Nothing for a tensor that is not plain. Asks no code of the user's.
  std::optional<PlainTensor> plain(PyObject* tensor) const;
  // The address of the first element of any tensor.
  uint64_t address(PyObject* tensor) const;
  // The row of a code; null when this torch lacks its dtype.
  const DtypeRow* row_of_code(uint64_t code) const;

 private:
  struct Exchange;
  const DtypeRow* row_of(PyObject* tensor) const;

  nb::object tensor_, parameter_;
  PyTypeObject* tensor_type_;
  PyTypeObject* parameter_type_;
  std::vector<DtypeRow> rows_;
  nb::object capsule_;
  const Exchange* exchange_ = nullptr;
  nb::str dtype_name_{"dtype"}, is_conj_{"is_conj"}, is_neg_{"is_neg"}, requires_grad_{"requires_grad"};
};

void bind_torch(nb::module_& module);

}  // namespace tierload
