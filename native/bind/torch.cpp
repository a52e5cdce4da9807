#include "bind/torch.h"

#include "state/leaves.h"
#include "tierload/accelerator.h"

namespace tierload {
namespace {

constexpr int32_t cpu = 1;         // DLPack's codes of the processor,
constexpr int32_t cuda = 2;        // and of CUDA; of ROCm, which torch calls by the same name, it has another one
constexpr int32_t ndim_max = 255;  // of the format

// DLPack's description of a tensor and its table of functions, as its specification lays them out (version 1).
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// The strides that torch gives a contiguous tensor, also for dimensions of one element.
bool contiguous(const DlTensor& tensor) {
  int64_t step = 1;
  for (int32_t dim = tensor.ndim; dim-- > 0;) {
    if (tensor.strides[dim] != step) return false;
    step *= tensor.shape[dim];
  }
  return true;
}

uint64_t start_of(const DlTensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset; }

// The number of the accelerator that a tensor's memory is of, 0 for the processor's; nothing where the core reaches
// neither.
std::optional<uint8_t> device_of(const DlTensor& tensor) {
  if (tensor.device_type == cpu) return fake_at(start_of(tensor));
  if (tensor.device_type != cuda || tensor.device_id < 0 || tensor.device_id + 1 >= first_fake) return std::nullopt;
  const auto number = static_cast<uint8_t>(tensor.device_id + 1);
  if (find_accelerator(number) == nullptr) return std::nullopt;
  return number;
}

}  // namespace

struct Torch::Exchange {
  uint32_t major;
  uint32_t minor;
  const Exchange* older;
  void* allocate;
  void* export_tensor;
  void* import_tensor;
  int (*look)(void* tensor, DlTensor* out);  // borrows; sets a Python error when it returns another number than 0
  void* stream;
};

Torch::Torch(nb::type_object tensor, nb::type_object parameter, const nb::list& dtypes, const nb::object& exchange)
    : tensor_(std::move(tensor)),
      parameter_(std::move(parameter)),
      tensor_type_(reinterpret_cast<PyTypeObject*>(tensor_.ptr())),
      parameter_type_(reinterpret_cast<PyTypeObject*>(parameter_.ptr())),
      capsule_(exchange),
      is_conj_(tensor_.attr("is_conj")),
      is_neg_(tensor_.attr("is_neg")),
      dtype_(tensor_.attr("dtype")),
      requires_grad_(tensor_.attr("requires_grad")),
      grad_fn_(tensor_.attr("grad_fn")) {
  for (const nb::handle item : dtypes) {
    const auto row = nb::cast<nb::tuple>(item);
    rows_.push_back({nb::borrow(row[0]), nb::cast<uint8_t>(row[1]), nb::cast<uint8_t>(row[2]), nb::cast<bool>(row[3]),
                     nb::cast<bool>(row[4])});
  }
  if (capsule_.is_none()) return;
  const void* table = PyCapsule_GetPointer(capsule_.ptr(), "dlpack_exchange_api");
  if (table == nullptr) throw nb::python_error();
  exchange_ = static_cast<const Exchange*>(table);
  while (exchange_ != nullptr && exchange_->major != 1) exchange_ = exchange_->older;
}

// Found once in torch's class: a search for each tensor takes as long as the answer.
bool Torch::answer(const nb::object& method, PyObject* tensor) const {
  const nb::object found = nb::steal(PyObject_Vectorcall(method.ptr(), &tensor, 1, nullptr));
  if (!found.is_valid()) throw nb::python_error();
  return found.ptr() == Py_True;
}

nb::object Torch::attribute(const nb::object& getter, PyObject* tensor) const {
  PyObject* found = Py_TYPE(getter.ptr())->tp_descr_get(getter.ptr(), tensor, tensor_.ptr());
  if (found == nullptr) throw nb::python_error();
  return nb::steal(found);
}

bool Torch::has_graph(PyObject* tensor) const { return !attribute(grad_fn_, tensor).is_none(); }

// DLPack calls integers of 1 to 7 bits by the name of those with 8; all others have one of their own.
const DtypeRow* Torch::row_of(PyObject* tensor, uint8_t kind, uint8_t bits) const {
  const uint32_t exchanged = bits == 8 && kind < 2 ? 0 : uint32_t{kind} << 8 | bits;
  if (exchanged != 0) {
    if (last_ != nullptr && last_->exchanged == exchanged) return last_;
    for (const DtypeRow& row : rows_) {
      if (row.exchanged == exchanged) return last_ = &row;
    }
  }
  const nb::object dtype = attribute(dtype_, tensor);
  for (DtypeRow& row : rows_) {
    if (row.dtype.ptr() != dtype.ptr()) continue;
    row.exchanged = exchanged;
    return &row;
  }
  return nullptr;
}

std::optional<PlainRange> Torch::range(PyObject* tensor) const {
  if (exchange_ == nullptr) return std::nullopt;
  DlTensor seen;
  if (exchange_->look(tensor, &seen) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (seen.data == nullptr || !contiguous(seen)) return std::nullopt;
  const auto device = device_of(seen);
  if (!device) return std::nullopt;
  uint64_t bytes = uint64_t{seen.dtype_bits} * seen.dtype_lanes / 8;
  for (int32_t dim = 0; dim < seen.ndim; ++dim) bytes *= static_cast<uint64_t>(seen.shape[dim]);
  return PlainRange{start_of(seen), start_of(seen) + bytes, *device};
}

std::optional<PlainTensor> Torch::plain(PyObject* tensor, bool detached) const {
  if (exchange_ == nullptr) return std::nullopt;
  DlTensor seen;
  if (exchange_->look(tensor, &seen) != 0) {
    PyErr_Clear();  // sparse, quantized, nested, on meta: there is another way for those
    return std::nullopt;
  }
  if (seen.data == nullptr || seen.ndim > ndim_max || !contiguous(seen)) return std::nullopt;
  const auto device = device_of(seen);
  if (!device) return std::nullopt;
  const DtypeRow* row = row_of(tensor, seen.dtype_code, seen.dtype_bits);
  if (row == nullptr) return std::nullopt;
  PlainTensor plain{static_cast<const std::byte*>(seen.data) + seen.byte_offset,
                    {seen.shape, static_cast<size_t>(seen.ndim)},
                    row,
                    row->bytes,
                    0,
                    *device};
  for (const int64_t size : plain.shape) plain.bytes *= static_cast<uint64_t>(size);
  if (plain.bytes == 0) return std::nullopt;
  const bool differentiable = row->floating || row->complex;
  if (row->complex && answer(is_conj_, tensor)) plain.marks |= mark_conj;
  if (answer(is_neg_, tensor)) plain.marks |= mark_neg;
  if (detached) {
    plain.marks |= mark_detached;
    return plain;
  }
  if (Py_TYPE(tensor) == parameter_type_) plain.marks |= mark_parameter;
  if (differentiable && attribute(requires_grad_, tensor).ptr() == Py_True) plain.marks |= mark_grad;
  return plain;
}

uint64_t Torch::address(PyObject* tensor) const {
  DlTensor seen;
  if (exchange_ != nullptr && exchange_->look(tensor, &seen) == 0) {
    return start_of(seen);
  }
  PyErr_Clear();
  return nb::cast<uint64_t>(nb::handle(tensor).attr("data_ptr")());
}

const DtypeRow* Torch::row_of_code(uint64_t code) const {
  for (const DtypeRow& row : rows_) {
    if (row.code == code) return &row;
  }
  return nullptr;
}

void bind_torch(nb::module_& module) {
  nb::class_<Torch>(module, "Torch",
                    "What the core asks torch about tensors; rows: dtype, code, bytes, floating, complex.")
      .def(nb::init<nb::type_object, nb::type_object, const nb::list&, const nb::object&>(), nb::arg("tensor"),
           nb::arg("parameter"), nb::arg("dtypes"), nb::arg("exchange").none(),
           nb::sig(
               "def __init__(self, tensor: type, parameter: type, dtypes: list[tuple[object, int, int, bool, bool]], "
               "exchange: object | None) -> None"));
}

}  // namespace tierload
