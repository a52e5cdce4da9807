// What every Storage must do, whoever implements it.
#pragma once

#include <functional>
#include <memory>

#include "tierload/storage.h"

// Call this from a TEST_CASE. `fresh` gives, each time, a storage whose directory is empty or does not exist yet.
// Nothing here depends on a real file system, and nothing on what survives a crash.
void storage_conformance(const std::function<std::shared_ptr<tierload::Storage>()>& fresh);
void data_conformance(const std::function<std::shared_ptr<tierload::Storage>()>& fresh);
