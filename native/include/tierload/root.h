// The root of a commit by several ranks: a file with one row a rank, which COMMIT pins (docs/FORMAT.md section 6.1).
// The rows are the commit's version vector: a rank whose shard did not change has the row of the commit before.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tierload/manifest.h"

namespace tierload {

std::string root_path(uint64_t epoch, uint64_t txid);

// Rows in rank order.
SealedFile encode_root(std::span<const RootRow> rows, uint64_t epoch, uint64_t txid);

// Why `row` cannot be that of `rank` in the root of transaction `txid` of `epoch`, naming the rank, or "".
std::string row_fault(const RootRow& row, uint32_t rank, uint64_t epoch, uint64_t txid);

// The rows of a commit's root, in rank order, each within its bounds. `row` is the COMMIT's: with one rank it is the
// root; with more it pins the file, whose mirror serves when it must (which is added to `warnings`). Throws
// CorruptError when neither copy does.
std::vector<RootRow> read_root(Storage& storage, const RootRow& row, uint32_t ranks,
                               std::vector<std::string>* warnings);

// What is wrong with one copy of a root file, or "".
std::string check_root_copy(Storage& storage, const RootRow& row, bool mirror);

}  // namespace tierload
