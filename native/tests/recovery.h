// What those who open a store after a crash find in it: everything is read, and what contradicts itself is an error.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tests/workload.h"

namespace tierload {

struct Found {
  std::optional<Model> model;
  std::string error;  // why there is no model
};

// Opens for writing. `thorough`: goes back to every commit, not only to the oldest, and frees what the crash left,
// which must change nothing that can be seen.
Found recover(const std::shared_ptr<Storage>& disk, CatalogOptions options, bool thorough);
// Opens for reading.
Found look(const std::shared_ptr<Storage>& disk, CatalogOptions options);

}  // namespace tierload
