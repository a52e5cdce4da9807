// A commit from its first page to its record, in the order of docs/FORMAT.md section 9.
#include <unistd.h>

#include "tierload/catalog.h"

namespace tierload {

Transaction::Transaction(Catalog& catalog, uint64_t txid) : catalog_(catalog), txid_(txid) {
  catalog.in_flight_ = txid;
}

Transaction::~Transaction() {
  catalog_.in_flight_ = 0;
  if (committed_ || catalog_.owner_ != getpid()) return;  // a forked child's copy owns nothing
  appender_ = nullptr;
  segment_ = nullptr;
  manifest_files_.clear();
  for (const std::string& path : paths_) {
    try {
      catalog_.storage_->remove(path);
    } catch (const IoError&) {
      // The file is garbage that no commit names; collect() removes it another time.
    }
  }
}

void Transaction::check_usable() const {
  catalog_.check_usable();
  if (failed_) throw UsageError("this save failed earlier, so it can only be given up");
}

void Transaction::fail(const IoError& error, bool sync_failed) {
  failed_ = true;
  catalog_.fail(error, sync_failed);
}

void Transaction::open_segment(SegmentRow& row, uint64_t expected) {
  check_usable();
  end_segment();
  wrote_something();
  row = {catalog_.epoch_, txid_, 0, segments_++, 0};
  const std::string path = row.path();
  segment_ = catalog_.storage_->open(path, OpenMode::create);
  paths_.push_back(path);
  appender_ = catalog_.storage_->append(*segment_, path, expected);
}

void Transaction::append(std::span<const Bytes> parts) {
  check_usable();
  try {
    appender_->append(parts);
  } catch (const IoError& error) {
    fail(error, false);
    throw;
  }
}

// A full segment is made durable at once, so that one open file is enough, and flushes are spread.
void Transaction::end_segment() {
  if (!segment_) return;
  try {
    appender_->finish();
  } catch (const IoError& error) {
    fail(error, false);
    throw;
  }
  try {
    if (catalog_.options_.mutant != Mutant::no_segment_sync) segment_->sync();
  } catch (const IoError& error) {
    fail(error, true);
    throw;
  }
  appender_ = nullptr;
  segment_ = nullptr;
}

RootRow Transaction::write_manifest(ManifestParts parts) {
  check_usable();
  parts.epoch = catalog_.epoch_;
  parts.txid = txid_;
  const EncodedManifest encoded = encode_manifest(parts);
  const std::string path = manifest_path(parts.epoch, txid_, parts.rank);
  wrote_something();
  for (const std::string& copy : {path, path + ".m"}) {
    manifest_files_.push_back(catalog_.storage_->open(copy, OpenMode::create));
    paths_.push_back(copy);
    try {
      manifest_files_.back()->write(0, encoded.file);
    } catch (const IoError& error) {
      fail(error, false);
      throw;
    }
  }
  RootRow row;
  row.rank = parts.rank;
  row.epoch = parts.epoch;
  row.txid = txid_;
  row.body_length = encoded.body_length;
  row.digest = encoded.digest;
  return row;
}

void Transaction::wrote_something() {
  if (catalog_.options_.mutant != Mutant::flush_once) flushed_ = false;
}

void Transaction::flush() {
  check_usable();
  if (flushed_) return;
  const Mutant mutant = catalog_.options_.mutant;
  end_segment();
  try {
    if (mutant != Mutant::no_manifest_sync) {
      // In pairs, the mirror second.
      for (size_t i = 0; i < manifest_files_.size(); ++i) {
        if (mutant != Mutant::one_manifest_sync || i % 2 == 0) manifest_files_[i]->sync();
      }
    }
    if (mutant != Mutant::no_directory_sync) {
      if (segments_ > 0) catalog_.storage_->sync_dir("seg");
      if (!manifest_files_.empty()) catalog_.storage_->sync_dir("man");
    }
  } catch (const IoError& error) {
    fail(error, true);
    throw;
  }
  manifest_files_.clear();
  flushed_ = true;
}

CommitPtr Transaction::commit(Commit draft, const std::vector<std::string>& tags) {
  flush();
  Catalog& catalog = catalog_;
  for (const std::string& tag : tags) catalog.check_tag_name(tag);  // before anything is queued
  const CommitPtr head = catalog.state_.head();
  draft.txid = txid_;
  draft.previous = head ? head->id : Digest{};
  if (!draft.rollback) draft.parent = head ? head->txid : 0;
  const size_t queued = catalog.unsynced_.size();
  try {
    catalog.append(RecordType::commit, txid_, encode_commit(draft));
    for (const std::string& tag : tags) catalog.append_tag(tag, txid_);
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
