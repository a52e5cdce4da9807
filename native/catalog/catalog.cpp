// Changing a store: small values, tags, rollback, and what every change has in common.
#include "tierload/catalog.h"

#include <unistd.h>

#include "catalog/super.h"
#include "tierload/bytes.h"
#include "tierload/root.h"

namespace tierload {
namespace {

// Room that a transaction keeps in the journal from its start, so that its COMMIT never meets a full disk.
constexpr uint64_t commit_headroom = 32 * 1024;

// A snapshot of the catalog has to fit into one record, with room for what is queued.
constexpr uint64_t catalog_bytes_max = record_payload_max / 4 * 3;
constexpr uint64_t name_bytes_max = 64 * 1024;
constexpr uint64_t queued_bytes_max = 16u << 20;  // of records that wait for a sync

}  // namespace

std::unique_ptr<Transaction> Catalog::begin(uint32_t ranks) {
  check_usable();
  if (ranks == 0 || ranks > ranks_max) {
    throw UsageError("a save is by 1 to " + std::to_string(ranks_max) + " ranks, not by " + std::to_string(ranks));
  }
  if (in_flight_ != 0) throw UsageError("a save into " + storage_->name() + " is already under way");
  if (ranks > 1) need(feature_ranks);
  roll_if_long();
  try {
    journal_->reserve(commit_headroom);
  } catch (const IoError& error) {
    fail(error, false);
    throw;
  }
  return std::unique_ptr<Transaction>(new Transaction(*this, next_txid_++, ranks));
}

uint64_t Catalog::change(const std::string& key, std::optional<std::string> value, bool sync) {
  check_usable();
  Change change{key, std::nullopt, std::move(value)};
  const auto found = state_.values().find(key);
  if (found != state_.values().end()) change.before = found->second;
  const uint64_t lsn = append(RecordType::change, 0, encode_change(change));
  queued_bytes_ += change.key.size() + (change.after ? change.after->size() : 0);
  if (sync || queued_bytes_ > queued_bytes_max) {
    sync_records(unsynced_.size() - 1);
    roll_if_long();
  } else {
    keep_commit_room();
  }
  return lsn;
}

void Catalog::flush() {
  if (journal_ && owner_ == getpid() && !unsynced_.empty() && poison().empty()) sync_records(unsynced_.size());
}

uint64_t Catalog::tag(const std::string& name, uint64_t txid) {
  check_usable();
  const uint64_t lsn = append_tag(name, txid);
  sync_records(unsynced_.size() - 1);
  roll_if_long();
  return lsn;
}

void Catalog::check_tag_name(const std::string& name) const {
  if (name.empty()) throw UsageError("a tag needs a name");
  if (name.size() > name_bytes_max) {
    throw UsageError("a tag's name has " + std::to_string(name.size()) + " bytes; it may have " +
                     std::to_string(name_bytes_max));
  }
}

uint64_t Catalog::append_tag(const std::string& name, uint64_t txid) {
  check_tag_name(name);
  if (txid != 0 && !state_.find(txid)) throw UsageError("no commit " + std::to_string(txid) + " to tag");
  const auto found = state_.tags().find(name);
  const TagChange tag{name, found == state_.tags().end() ? 0 : found->second, txid};
  if (tag.before == 0 && txid == 0) throw UsageError("there is no tag '" + name + "'");
  return append(RecordType::tag, 0, encode_tag(tag));
}

CommitPtr Catalog::rollback(const CatalogState& target, const std::string& meta) {
  check_usable();
  const CommitPtr source = target.head();
  if (!source) throw UsageError("there was no commit yet, so there is nothing to roll back to");
  if (!state_.find(source->txid)) {
    throw UsageError("commit " + std::to_string(source->txid) + " has been collected");
  }
  for (const RootRow& row : read_root(*storage_, source->root, source->ranks, &warnings_)) {
    Manifest::open(*storage_, row, source->ranks, &warnings_);
  }
  Commit draft;
  draft.rollback = true;
  draft.parent = source->txid;
  draft.source = source->txid;
  draft.step = source->step;
  draft.raw_bytes = source->raw_bytes;
  draft.ranks = source->ranks;
  draft.root = source->root;
  draft.meta = meta;
  for (const auto& [key, value] : state_.values()) {
    const auto then = target.values().find(key);
    if (then == target.values().end()) {
      draft.changes.push_back({key, value, std::nullopt});
    } else if (then->second != value) {
      draft.changes.push_back({key, value, then->second});
    }
  }
  for (const auto& [key, value] : target.values()) {
    if (!state_.values().contains(key)) draft.changes.push_back({key, std::nullopt, value});
  }
  return begin()->record(std::move(draft), {});
}

uint64_t Catalog::append(RecordType type, uint64_t txid, const std::vector<std::byte>& payload) {
  Record record{type, 0, 0, txid, options_.now(), payload};
  record.lsn = journal_->append(type, txid, record.time, payload);
  state_.apply(record);
  if (state_.encoded_bytes() > catalog_bytes_max && type != RecordType::collect) {
    state_.undo(record);
    journal_->drop_newest();
    throw UsageError(storage_->name() + ": its catalog of commits, tags and recorded values is full (" +
                     std::to_string(catalog_bytes_max) +
                     " bytes): drop old commits with collect(keep=...), and record " + "less or smaller values");
  }
  unsynced_.push_back(std::move(record));
  return unsynced_.back().lsn;
}

void Catalog::sync_records(size_t kept_on_full_disk) {
  sync_journal(kept_on_full_disk);
  check_fence();
  keep_commit_room();
}

// What is acknowledged beside a transaction takes of the room that begin() made for its COMMIT. On a full disk records
// go before it: they are acknowledged as long as they fit, and a COMMIT that does not is a clean abort.
void Catalog::keep_commit_room() {
  if (in_flight_ == 0) return;
  try {
    journal_->reserve(commit_headroom);
  } catch (const IoError& error) {
    fail(error, false);
    if (!error.out_of_space()) throw;
  }
}

// Takes the newest records back that wait for a sync, down to `kept`.
void Catalog::take_back(size_t kept) {
  while (unsynced_.size() > kept) {
    state_.undo(unsynced_.back());
    unsynced_.pop_back();
    journal_->drop_newest();
  }
}

void Catalog::sync_journal(size_t kept_on_full_disk) {
  try {
    journal_->sync();
  } catch (const IoError& error) {
    if (journal_->poisoned()) {
      poison(error.what());
    } else {
      // The disk was full before a byte of the group was written: the newest records have not happened, and what was
      // queued before them waits for the next sync.
      take_back(kept_on_full_disk);
    }
    throw;
  }
  unsynced_.clear();
  queued_bytes_ = 0;
  last_ = journal_->end();
}

void Catalog::check_fence() {
  if (options_.mutant == Mutant::no_fence) return;
  SuperScan super;
  try {
    super = read_super(*storage_);
  } catch (const IoError& error) {
    poison(error.what());  // whether another writer took over is unknown, so nothing more is acknowledged
    throw;
  }
  if (!super.present || !lock_file_->linked()) {
    poison("its directory was removed, or another writer took it over");
    throw FencedError(storage_->name() + ": " + poison() + "; what this one did since does not count");
  }
  if (super.best && super.best->epoch > epoch_) {
    poison("another writer took the store over (epoch " + std::to_string(super.best->epoch) + ", ours is " +
           std::to_string(epoch_) + ")");
    throw FencedError(storage_->name() + ": " + poison() + "; what this one did since does not count");
  }
}

void Catalog::close() {
  flush();
  if (owner_ == getpid()) poison("it was closed");  // a fork may have come while another thread held the mutex
  journal_ = nullptr;
  lock_ = nullptr;
  lock_file_ = nullptr;
}

void Catalog::check_usable() const {
  if (owner_ == 0) throw UsageError(storage_->name() + " is open for reading only");
  if (owner_ != getpid()) {
    throw UsageError(storage_->name() + " was opened for writing by process " + std::to_string(owner_) +
                     ", which holds it; a forked process has to open it itself");
  }
  if (const std::string why = poison(); !why.empty()) {
    throw PoisonedError(storage_->name() + ": this writer failed earlier (" + why +
                        ") and acknowledges nothing more; open the store anew");
  }
}

void Catalog::fail(const IoError& error, bool sync_failed) {
  if (sync_failed || !error.out_of_space()) poison(error.what());
}

void Catalog::poison(std::string why) {
  const std::lock_guard guard(poison_mutex_);
  poison_ = std::move(why);
}

std::string Catalog::poison() const {
  const std::lock_guard guard(poison_mutex_);
  return poison_;
}

bool Catalog::remove_for_good(JournalName name) {
  try {
    for (const char copy : {'c', 'm'}) storage_->remove(name.path(copy));
    storage_->sync_dir("wal");
    return true;
  } catch (const IoError&) {
    return false;
  }
}

void Catalog::roll_if_long() {
  if (journal_->bytes() >= options_.journal_roll_bytes) roll(true);
}

// Marks SUPER first and then, by a new one, the journal, before any record that needs the mark. A crash between leaves
// a mark too many.
void Catalog::need(uint64_t feature) {
  if (!(features_ & feature)) {
    features_ |= feature;
    try {
      ++generation_;
      write_super(*storage_, {store_id_, generation_, epoch_, base_, features_, {}});
    } catch (const IoError& error) {
      poison(std::string("marking SUPER failed: ") + error.what());
      throw;
    }
  }
  if (!(journal_->header().features & feature)) roll(false);
}

// With `may_wait` the old journal serves on where the disk is too full for a new one.
void Catalog::roll(bool may_wait) {
  if (!unsynced_.empty()) sync_records(unsynced_.size());  // the snapshot must not hold what its predecessor does not
  const JournalName next{epoch_, ++last_seq_};
  try {
    start_journal(next);
    ++generation_;
    write_super(*storage_, {store_id_, generation_, epoch_, next, features_, {}});
    base_ = next;
  } catch (const IoError& error) {
    // A journal that may be complete on disk would win over the old one at the next open, and hide what the old one
    // gets from now on. So it has to be gone for good, or nothing more is acknowledged. A full disk is what a save in
    // flight may bring: the old journal serves on until there is room, though not without end.
    const bool begun = journal_->header().name == next;
    const bool waits = journal_->bytes() < options_.journal_roll_bytes + options_.journal_roll_bytes / 2;
    if (error.out_of_space() && !begun && waits && remove_for_good(next)) {
      if (may_wait) return;
      throw;
    }
    poison(std::string("rolling the journal failed: ") + error.what());
    throw;
  }
  keep_commit_room();
}

}  // namespace tierload
