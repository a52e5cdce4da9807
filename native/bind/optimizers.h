// What state_dict() of an optimizer of torch gives, in the form of the document, without a name or number of Python's
// for each parameter.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bind/parameter_names.h"

namespace tierload {

class OptimizerState {
 public:
  struct Row {
    uint32_t position;
    nb::object value;
  };

  // Nothing unless all parameters have a name of their own in plain text, stand in one group once, and have the states.
  static std::optional<OptimizerState> of(nb::handle groups, nb::handle state, const TensorKeys& keys);

  // The content of the document's `names`.
  const std::string& names() const { return names_; }
  // The param_groups of state_dict().
  const nb::list& groups() const { return groups_; }
  // The states by position, in their own order.
  const std::vector<Row>& rows() const { return rows_; }
  std::string_view name(uint32_t position) const {
    return std::string_view(names_).substr(spans_[position].first, spans_[position].second);
  }

 private:
  bool add_group(PyObject* group, const TensorKeys& keys);
  bool add_states(PyObject* state);

  nb::list groups_;
  std::vector<Row> rows_;
  std::string names_;
  std::vector<std::pair<size_t, size_t>> spans_;  // start and length of each name in names_
  Identities positions_;                          // of the parameters
  Identities hashes_;                             // of their names
};

void bind_optimizers(nb::module_& module);

}  // namespace tierload
