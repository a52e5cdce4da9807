// The state document on its way back: JSON as Python's dicts, lists and scalars.
#pragma once

#include "bind/bind.h"

namespace tierload {

// Throws CorruptError for a text that is no JSON, or that names a member of an object twice.
nb::object parse_nodes(std::string_view document);

}  // namespace tierload
