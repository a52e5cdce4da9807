// Memory that stays: ranges that the kernel must not swap out, on the NUMA node that is wanted.
//
// Nothing here fails because the system does not allow it: what could be done is done, and the report says what could
// not, and why. Ranges are widened to whole pages. All functions may be called by any thread. A forked child has the
// memory, but not its locks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace tierload {

// `length` bytes from an address.
struct Region {
  uint64_t address;
  uint64_t length;
};

struct LockReport {
  uint64_t locked = 0;   // bytes in whole pages
  uint64_t refused = 0;  // bytes that stay as they were
  std::string reason;    // why, if any were refused; else empty
  std::string method;    // the call that locked: mlock2 or mlock; empty where nothing was locked
  std::string placing;   // why memory could not be given to the node; empty where it could, or none was wanted
};

// Locks as much of `regions` as the process may lock, the first ones first: up to RLIMIT_MEMLOCK less what is locked
// already (a region that is counts again), or everything with CAP_IPC_LOCK. Pages are locked as they are touched
// (MLOCK_ONFAULT), so that this costs a call for each region that stands alone and nothing for each byte; where the
// kernel has no mlock2, mlock serves, which touches all. Pages that are not there yet come from `node`, as long as it
// has some (MPOL_PREFERRED). Throws UsageError for a region beyond the end of memory.
LockReport lock_memory(std::span<const Region> regions, std::optional<uint32_t> node);

// Unlocks `regions`, and with them the rest of the pages that they begin and end in. In the report `locked` are the
// bytes that are no longer, `refused` those that are not mapped any more.
LockReport unlock_memory(std::span<const Region> regions);

}  // namespace tierload
