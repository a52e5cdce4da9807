// A commit from its first page to its record, in the order of docs/FORMAT.md section 9.
#include <unistd.h>

#include <algorithm>

#include "catalog/names.h"
#include "tierload/catalog.h"
#include "tierload/root.h"

namespace tierload {

Transaction::Transaction(Catalog& catalog, uint64_t txid, uint32_t ranks)
    : catalog_(catalog),
      attempt_{catalog.epoch_, txid, ranks, catalog.options_.mutant},
      shard_(*catalog.storage_, attempt_, 0, catalog) {
  catalog.in_flight_ = txid;
}

Transaction::~Transaction() {
  catalog_.in_flight_ = 0;
  catalog_.dropped_rows_.clear();
  if (committed_ || catalog_.owner_ != getpid()) return;  // a forked child's copy owns nothing
  root_files_.clear();
  shard_.remove();
  if (attempt_.ranks > 1) remove_all();
}

// What the ranks wrote, and the root: from here on nobody can commit it. Ranks that write on leave garbage.
void Transaction::remove_all() {
  Storage& storage = *catalog_.storage_;
  for (const char* dir : {"man", "seg"}) {
    try {
      for (const std::string& file : storage.list(dir)) {
        const auto name = parse_data_name(file);
        if (!name || name->epoch != attempt_.epoch || name->txid != attempt_.txid) continue;
        storage.remove(std::string(dir) + "/" + file);
      }
    } catch (const IoError&) {
      // The files are garbage that no commit names; collect() removes them another time.
    }
  }
}

void Transaction::check_rows(std::span<const RootRow> rows) const {
  const Mutant mutant = attempt_.mutant;
  if (rows.size() != attempt_.ranks && mutant != Mutant::missing_row) {
    throw UsageError("a commit by " + std::to_string(attempt_.ranks) + " ranks needs a row of each, not " +
                     std::to_string(rows.size()));
  }
  std::vector<RootRow> older;
  for (uint32_t rank = 0; rank < rows.size(); ++rank) {
    const std::string fault = row_fault(rows[rank], rank, attempt_.epoch, attempt_.txid);
    if (!fault.empty()) throw UsageError(fault);
    if (rows[rank].txid != attempt_.txid) older.push_back(rows[rank]);
  }
  if (mutant == Mutant::stale_row) return;
  // A shard that did not change is one that a commit has, or had until it was dropped beside this attempt. Any other is
  // of an attempt that was given up, whose files may be gone.
  std::erase_if(older, [&](const RootRow& row) { return std::ranges::count(catalog_.dropped_rows_, row) > 0; });
  const auto& commits = catalog_.state_.commits();
  for (auto commit = commits.rbegin(); commit != commits.rend() && !older.empty(); ++commit) {
    if (commit->second->ranks != attempt_.ranks) continue;
    try {
      const auto known = catalog_.root(commit->first);
      std::erase_if(older, [&](const RootRow& row) { return known[row.rank] == row; });
    } catch (const CorruptError&) {
      // A damaged root vouches for nothing.
    }
  }
  if (!older.empty()) {
    throw UsageError("rank " + std::to_string(older.front().rank) + " handed in the shard of transaction " +
                     std::to_string(older.front().txid) + ", which no commit has: it is of an earlier attempt");
  }
}

RootRow Transaction::write_root(std::span<const RootRow> rows) {
  const SealedFile sealed = encode_root(rows, attempt_.epoch, attempt_.txid);
  const std::string path = root_path(attempt_.epoch, attempt_.txid);
  for (const std::string& copy : {path, path + ".m"}) {
    root_files_.push_back(catalog_.storage_->open(copy, OpenMode::create));
    try {
      root_files_.back()->write(0, sealed.file);
    } catch (const IoError& error) {
      catalog_.fail(error, false);
      throw;
    }
  }
  if (attempt_.mutant != Mutant::root_after_commit) sync_root();
  RootRow row;
  row.epoch = attempt_.epoch;
  row.txid = attempt_.txid;
  row.body_length = sealed.body_length;
  row.digest = sealed.digest;
  return row;
}

void Transaction::sync_root() {
  try {
    for (const auto& file : root_files_) file->sync();
    if (!root_files_.empty()) catalog_.storage_->sync_dir("man");
  } catch (const IoError& error) {
    catalog_.fail(error, true);
    throw;
  }
  root_files_.clear();
}

CommitPtr Transaction::commit(Commit draft, std::span<const RootRow> rows, const std::vector<std::string>& tags) {
  for (const std::string& tag : tags) catalog_.check_tag_name(tag);  // before anything is queued
  shard_.flush();
  check_rows(rows);
  draft.ranks = static_cast<uint32_t>(rows.size());
  draft.root = rows.size() == 1 ? rows[0] : write_root(rows);
  CommitPtr commit = record(std::move(draft), tags);
  sync_root();  // of a seeded mistake; otherwise it was before
  return commit;
}

CommitPtr Transaction::record(Commit draft, const std::vector<std::string>& tags) {
  Catalog& catalog = catalog_;
  catalog.check_usable();
  const CommitPtr head = catalog.state_.head();
  draft.txid = attempt_.txid;
  draft.previous = head ? head->id : Digest{};
  if (!draft.rollback) draft.parent = head ? head->txid : 0;
  const size_t queued = catalog.unsynced_.size();
  try {
    catalog.append(RecordType::commit, attempt_.txid, encode_commit(draft));
    for (const std::string& tag : tags) catalog.append_tag(tag, attempt_.txid);
  } catch (const UsageError&) {
    catalog.take_back(queued);  // the catalog has room for the commit, but not for its tags
    throw;
  }
  // From the first byte of COMMIT on, this attempt may be found committed by whoever opens the store next: its files
  // must stay, whatever happens here.
  committed_ = true;
  try {
    catalog.sync_journal(queued);
  } catch (const IoError&) {
    committed_ = catalog.journal_->poisoned();  // if not, nothing of COMMIT was written: a clean abort
    throw;
  }
  catalog.check_fence();
  return catalog.state_.head();
}

}  // namespace tierload
