#include "bind/optimizers.h"

#include <functional>

#include "bind/texts.h"

namespace tierload {

std::optional<OptimizerState> OptimizerState::of(nb::handle groups, nb::handle state, const TensorKeys& keys) {
  if (!PyList_CheckExact(groups.ptr()) || !PyDict_Check(state.ptr())) return std::nullopt;
  OptimizerState found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups.ptr()); ++i) {
    if (!found.add_group(PyList_GET_ITEM(groups.ptr(), i), keys)) return std::nullopt;
  }
  if (!found.add_states(state.ptr())) return std::nullopt;
  return found;
}

// A copy of the group with positions in the place of its parameters.
bool OptimizerState::add_group(PyObject* group, const TensorKeys& keys) {
  static const nb::str* const params = new nb::str("params");  // lives as long as the process
  PyObject* parameters = PyDict_CheckExact(group) ? PyDict_GetItemWithError(group, params->ptr()) : nullptr;
  if (parameters == nullptr || !PyList_CheckExact(parameters)) return false;
  nb::dict packed;
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(group, &at, &key, &value)) {
    if (!PyUnicode_CheckExact(key)) return false;
    if (value != parameters || PyUnicode_Compare(key, params->ptr()) != 0) packed[nb::handle(key)] = nb::handle(value);
  }
  nb::list positions;
  positions_.reserve(static_cast<size_t>(PyList_GET_SIZE(parameters)));
  hashes_.reserve(static_cast<size_t>(PyList_GET_SIZE(parameters)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); ++i) {
    PyObject* parameter = PyList_GET_ITEM(parameters, i);
    const auto position = static_cast<uint32_t>(spans_.size());
    const std::string_view name = keys.first(parameter);
    const uint64_t hash = std::hash<std::string_view>{}(name) | 1;  // two of one hash may be of one name
    if (name.empty() || !is_plain_text(name) || !hashes_.add(hash, position).second) return false;
    if (!positions_.add(parameter, position).second) return false;
    names_ += position == 0 ? "\"" : ",\"";
    spans_.emplace_back(names_.size(), name.size());
    names_ += name;
    names_ += '"';
    positions.append(position);
  }
  packed[*params] = positions;
  groups_.append(packed);
  return true;
}

bool OptimizerState::add_states(PyObject* state) {
  rows_.reserve(static_cast<size_t>(PyDict_GET_SIZE(state)));
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(state, &at, &key, &value)) {
    const uint32_t* position = positions_.number_of(key);
    if (position == nullptr) return false;
    rows_.push_back({*position, nb::borrow(value)});
  }
  return true;
}

void bind_optimizers(nb::module_& module) {
  nb::class_<OptimizerState>(module, "OptimizerState",
                             "What state_dict() of an optimizer gives; stands for its states in a state.")
      .def_static("of", &OptimizerState::of, nb::arg("groups"), nb::arg("state"), nb::arg("keys"),
                  nb::sig("def of(groups: object, state: object, keys: TensorKeys) -> OptimizerState | None"))
      .def_prop_ro("names",
                   [](const OptimizerState& self) { return nb::str(self.names().data(), self.names().size()); })
      .def_prop_ro("groups", &OptimizerState::groups, nb::sig("def groups(self) -> list[dict[str, object]]"));
}

}  // namespace tierload
