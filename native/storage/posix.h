// What the storages of this room share.
#pragma once

#include <memory>

#include "storage/posix_tree.h"
#include "tierload/storage.h"

namespace tierload::posix {

// Plain system calls below `tree`.
std::unique_ptr<Storage> storage_on(std::shared_ptr<Tree> tree);

}  // namespace tierload::posix
