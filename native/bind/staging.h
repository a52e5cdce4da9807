// Pages that are saved, and copies of them, on the edge to Python.
#pragma once

#include <memory>

#include "bind/bind.h"
#include "tierload/staging.h"

namespace tierload {

void bind_staging(nb::module_& module);

}  // namespace tierload
