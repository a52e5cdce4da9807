// The state document on its way back: JSON as Python's dicts, lists and scalars.
#pragma once

#include "bind/bind.h"

namespace tierload {

// Throws CorruptError for a text that is no JSON, or that names a member of an object twice.
nb::object parse_nodes(std::string_view document);

// Whether a node is its own value.
bool is_scalar(PyObject* node);
// Key or index, and node, of the members of a dict or list that may hold others: those that are no scalars and no
// tensors. Few nodes of a large state do.
nb::list inner_nodes(const nb::object& container);

}  // namespace tierload
