#include "bind/parameter_names.h"

#include <algorithm>

#include "bind/texts.h"

namespace tierload {

void TensorKeys::add(nb::handle tensor, std::string_view key) {
  const size_t key_at = keys_.size();
  keys_ += key;
  close(tensor, key_at);
}

void TensorKeys::add_module(const ModuleState& state, const std::string& key) {
  last_.reserve(state.members().size());
  for (const auto& member : state.members()) {
    if (!member.parameter) continue;
    const size_t key_at = keys_.size();
    keys_ += key;
    if (!key.empty()) keys_ += '/';
    put_element(keys_, state.name(member));
    close(member.tensor, key_at);
  }
}

// Adds a row whose key is what has been added to `keys_` since.
void TensorKeys::close(nb::handle tensor, size_t key_at) {
  const auto number = static_cast<uint32_t>(rows_.size());
  const auto [before, fresh] = last_.add(tensor.ptr(), number);
  if (!fresh) last_.renumber(tensor.ptr(), number);
  rows_.push_back({nb::borrow(tensor), key_at, keys_.size() - key_at, fresh ? none : before});
}

std::string_view TensorKeys::first(PyObject* tensor) const {
  const uint32_t* row = last_.number_of(tensor);
  if (row == nullptr) return {};
  std::string_view found = key(rows_[*row]);
  for (uint32_t i = rows_[*row].before; i != none; i = rows_[i].before) found = std::min(found, key(rows_[i]));
  return found;
}

nb::list TensorKeys::of(nb::handle tensor) const {
  std::vector<std::string_view> found;
  const uint32_t* row = last_.number_of(tensor.ptr());
  for (uint32_t i = row == nullptr ? none : *row; i != none; i = rows_[i].before) found.push_back(key(rows_[i]));
  std::ranges::sort(found);
  nb::list keys;
  for (const std::string_view text : found) keys.append(text_of(text));
  return keys;
}

nb::list TensorKeys::all() const {
  nb::list rows;
  for (const Row& row : rows_) rows.append(nb::make_tuple(row.tensor, text_of(key(row))));
  return rows;
}

void bind_parameter_names(nb::module_& module) {
  nb::class_<TensorKeys>(module, "TensorKeys", "Keys of the tensors of a state, by identity.")
      .def(nb::init<>())
      .def(
          "add", [](TensorKeys& self, nb::handle tensor, nb::handle key) { self.add(tensor, utf8_of(key)); },
          nb::arg("tensor"), nb::arg("key"), nb::sig("def add(self, tensor: object, key: str) -> None"))
      .def(
          "add_module",
          [](TensorKeys& self, const ModuleState& state, nb::handle key) { self.add_module(state, utf8_of(key)); },
          nb::arg("state"), nb::arg("key"), nb::sig("def add_module(self, state: ModuleState, key: str) -> None"))
      .def("of", &TensorKeys::of, nb::arg("tensor"), nb::sig("def of(self, tensor: object) -> list[str]"))
      .def("all", &TensorKeys::all, nb::sig("def all(self) -> list[tuple[typing.Any, str]]"));
}

}  // namespace tierload
