// Locks on files that belong to this process alone, also when it forks.
#pragma once

#include <functional>
#include <memory>

#include "storage/posix_tree.h"
#include "tierload/storage.h"

namespace tierload::posix {

// Takes an OFD lock on the whole of the file that `reopen` opens anew; nullptr when another lock is in the way.
// The lock belongs to that new open file description and to nothing else, so it lives as long as the result.
std::unique_ptr<Lock> try_lock(const std::function<Fd()>& reopen, bool exclusive, const std::string& path);

// Whether an exclusive OFD lock of another open file description is on the file.
bool locked(int fd, const std::string& path);

}  // namespace tierload::posix
