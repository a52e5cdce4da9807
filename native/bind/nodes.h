// The state document on its way back: JSON as Python's dicts, lists and scalars.
#pragma once

#include "bind/bind.h"

namespace tierload {

// Throws CorruptError for a text that is no JSON, or that names a member of an object twice.
nb::object parse_nodes(std::string_view document);

// Whether a node is its own value.
bool is_scalar(PyObject* node);
// Whether a node may hold others: it is no scalar and no tensor. Few nodes of a large state do.
bool holds_others(PyObject* node);
// Key or index, and node, of the members of a dict or list that hold others.
nb::list inner_nodes(const nb::object& container);

}  // namespace tierload
