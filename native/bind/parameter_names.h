// What the parameters of optimizers are called: keys of tensors in a state, by identity.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bind/identities.h"
#include "bind/modules.h"

namespace tierload {

class TensorKeys {
 public:
  void add(nb::handle tensor, std::string_view key);
  // The parameters of a module at `key`.
  void add_module(const ModuleState& state, const std::string& key);

  // The first of a tensor's keys in byte order; empty when it has none (as the key of the state itself is).
  std::string_view first(PyObject* tensor) const;
  // All of them, in byte order.
  nb::list of(nb::handle tensor) const;
  // All tensors with their keys, in the order in which they came.
  nb::list all() const;

 private:
  static constexpr uint32_t none = 0xFFFFFFFF;
  struct Row {
    nb::object tensor;
    size_t key_at;
    size_t key_bytes;
    uint32_t before;  // another row of the same tensor
  };

  std::string_view key(const Row& row) const { return {keys_.data() + row.key_at, row.key_bytes}; }
  void close(nb::handle tensor, size_t key_at);

  std::vector<Row> rows_;
  std::string keys_;
  Identities last_;  // row of each tensor
};

void bind_parameter_names(nb::module_& module);

}  // namespace tierload
