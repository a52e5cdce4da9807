// What exists and what is current: opening, committing, tagging, freeing. The only implementation of
// docs/FORMAT.md sections 9 to 11. Every file operation goes through Storage, so the crash tests run this code.
//
// Threads: one at a time, except for the slow part of a save. Transaction::shard() and all that it does
// may run on one thread while others call the catalog, one at a time, by a lock that is the caller's and that
// begin(), Transaction::commit() and the Transaction's destruction take too. What this rests on:
//  * of the catalog, the slow part touches what never changes after the open, the storage, and `poison_`;
//  * all that it writes are files of its own epoch and txid, which collect() does not judge while it is under way;
//  * nothing that it wrote exists for the journal before commit(): records, tags, collections and journal rolls beside
//    it are whole without it, and its destruction takes nothing back but its files.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tierload/error.h"
#include "tierload/journal.h"
#include "tierload/manifest.h"
#include "tierload/shard.h"
#include "tierload/state.h"

namespace tierload {

struct CatalogOptions {
  bool take_over = false;                       // replace a holder that is frozen; it is fenced by its epoch
  uint64_t journal_roll_bytes = 16u << 20;      // a journal ends at this size
  uint64_t journal_fill_bytes = 64u << 10;      // zeros kept ahead of its end, so that a commit needs no space
  std::string holder;                           // written into LOCK: who we are, for messages
  std::function<uint64_t()> now;                // nanoseconds since 1970
  std::function<void(MutableBytes)> randomize;  // store id and salts
  Mutant mutant = Mutant::none;
};

// System clock and getrandom.
CatalogOptions default_catalog_options();

struct CollectResult {
  uint64_t removed_files = 0;
  uint64_t freed_bytes = 0;  // of removed files and punched pages
  uint64_t pinned = 0;       // manifests that a reader holds
};

class Catalog;

// One attempt to commit; the catalog outlives it. Destroying it before commit() removes what it wrote, and what other
// ranks wrote of it. When the catalog is closed meanwhile, every call but the destruction throws PoisonedError.
//
// Pages of a parent that the new commit refers to have to stay until commit() has returned: whoever writes keeps the
// parent's Manifest open so long. It may be any commit's, even one that a collection drops meanwhile.
class Transaction {
 public:
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  uint64_t txid() const { return attempt_.txid; }
  const Attempt& attempt() const { return attempt_; }
  // What rank 0 writes. After a failure there the Transaction can only be destroyed; any but a full disk poisons the
  // catalog.
  ShardWriter& shard() { return shard_; }
  // Flushes the shard, unless nothing was written since its last flush(), and commits, with `tags` moved to the new
  // commit in the same sync group. `rows` are those of all ranks, in rank order; rank 0's is the shard's. `draft` needs
  // step, meta, raw_bytes, written_bytes and changes. Throws UsageError, before anything has happened, for a row that
  // is missing, or that is neither this attempt's nor a commit's. On a full disk nothing has happened, and records that
  // wait for a sync go on waiting.
  CommitPtr commit(Commit draft, std::span<const RootRow> rows, const std::vector<std::string>& tags = {});

 private:
  friend class Catalog;
  Transaction(Catalog& catalog, uint64_t txid, uint32_t ranks);
  void check_rows(std::span<const RootRow> rows) const;
  RootRow write_root(std::span<const RootRow> rows);
  void sync_root();
  CommitPtr record(Commit draft, const std::vector<std::string>& tags);
  void remove_all();
  Catalog& catalog_;
  const Attempt attempt_;
  ShardWriter shard_;
  std::vector<std::unique_ptr<File>> root_files_;  // not synced yet
  bool committed_ = false;
};

class Catalog : private WriterHealth {
 public:
  // Creates the store when there is none. Throws BusyError, CorruptError (nothing was changed except the epoch),
  // UnsupportedError, IoError.
  static std::unique_ptr<Catalog> open_for_writing(std::shared_ptr<Storage> storage, CatalogOptions options);
  // Throws IoError(ENOENT) when there is no store. A damaged store opens at the newest state before the damage, which
  // damage() then describes.
  static std::unique_ptr<Catalog> open_for_reading(std::shared_ptr<Storage> storage, CatalogOptions options);
  ~Catalog() override;

  const CatalogState& state() const { return state_; }
  Storage& storage() const { return *storage_; }
  bool writable() const { return journal_ != nullptr; }
  uint64_t epoch() const { return epoch_; }
  uint64_t last_lsn() const { return last_.lsn; }
  // Whether a failure has left the disk in doubt: this writer acknowledges nothing more.
  bool poisoned() const { return !poison().empty(); }
  uint64_t journal_seq() const { return last_.name.seq; }
  const StoreId& store_id() const { return store_id_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  const std::string& damage() const { return damage_; }
  // What is wrong with the root, manifest or segments of the commit that was the head at the open, or ""; of ranks
  // other than 0 only whether their shards are there. The store works: older commits can be loaded and rolled back to.
  const std::string& head_damage() const { return head_damage_; }
  // The same of any commit, of all its ranks. Pages are not read.
  std::string check_commit(uint64_t txid) const;
  // The rows of a commit's root, one a rank. Throws CorruptError.
  std::vector<RootRow> root(uint64_t txid);
  // The shard of a rank in a commit, verified: of the head's rank 0 just now or, once, when a reader opened.
  std::unique_ptr<Manifest> open_manifest(uint64_t txid, uint32_t rank = 0);

  // Room for COMMIT is kept in the journal from here on, whatever else is written into it, as far as the disk has it.
  // The first one by several ranks marks the store as one that older releases do not read. Throws UsageError while
  // another one lives.
  std::unique_ptr<Transaction> begin(uint32_t ranks = 1);
  // Sets (or removes) a small value; durable when it returns unless `sync` is false, then with the next durable record.
  uint64_t change(const std::string& key, std::optional<std::string> value, bool sync);
  uint64_t tag(const std::string& name, uint64_t txid);  // txid 0 removes
  // Makes records that were appended without a sync durable.
  void flush();
  // Flushes, and lets go of the store even while somebody still holds this object, or writes a Transaction.
  void close();
  // A commit with an earlier state, as state_at() gives it: its head's manifest and its values. The manifest is
  // checked. A Transaction of its own, so not beside another one.
  CommitPtr rollback(const CatalogState& target, const std::string& meta);

  // Drops commits, then frees what nobody references. Refuses the head, tagged commits, and a rollback whose
  // superseded commits stay. With nothing to drop it only frees what earlier crashes left. What a Transaction that is
  // under way has written stays, and so does everything that a Manifest refers to which somebody keeps open.
  CollectResult collect(const std::vector<uint64_t>& drop);

  // The records after `lsn`, newest first, read back from the journals that are kept.
  // `warnings`, when given, gets what one copy of an older journal had to give for the other.
  std::vector<Record> records_after(uint64_t lsn, std::vector<std::string>* warnings = nullptr) const;
  // The state as it was at `lsn`, by undoing records from the newest.
  CatalogState state_at(uint64_t lsn) const;
  // The LSN of the oldest record that is kept, minus one: state_at() reaches back to here.
  uint64_t oldest_lsn() const;

  // Throws FencedError when another writer has taken over since.
  void check_fence();
  // Throws PoisonedError after a failure that leaves the disk in doubt. For any thread.
  void check_usable() const override;

 private:
  friend class Transaction;
  Catalog(std::shared_ptr<Storage> storage, CatalogOptions options);

  static std::unique_ptr<Catalog> recover(std::shared_ptr<Storage> storage, CatalogOptions options);
  static std::unique_ptr<Catalog> look(std::shared_ptr<Storage> storage, CatalogOptions options);
  struct Found;
  std::optional<JournalScan> scan(JournalName name, const StoreId* expected) const;
  Found find_journal(JournalName base, const StoreId* expected);
  void replay(const Found& found, bool for_writing);
  // A reader keeps the manifest, for whoever asks first.
  void check_head(bool keep);
  CommitPtr commit_of(uint64_t txid) const;
  std::string check(const Commit& commit, bool whole, std::unique_ptr<Manifest>& manifest) const;
  void lock(bool take_over);
  void start_journal(JournalName name);
  void roll_if_long();
  void roll(bool may_wait);
  void need(uint64_t feature);
  bool remove_for_good(JournalName name);
  void sync_records(size_t kept_on_full_disk);
  void sync_journal(size_t kept_on_full_disk);
  void check_tag_name(const std::string& name) const;
  void remove_leftovers(const Found& found);
  void keep_commit_room();
  void take_back(size_t kept);
  void fail(const IoError& error, bool sync_failed) override;
  void poison(std::string why);
  std::string poison() const;
  uint64_t append_tag(const std::string& name, uint64_t txid);
  uint64_t append(RecordType type, uint64_t txid, const std::vector<std::byte>& payload);

  void keep_rows(const std::vector<CommitPtr>& dropped);
  void sweep(CollectResult& result);
  void remove_old_journals(CollectResult& result);

  std::shared_ptr<Storage> storage_;
  CatalogOptions options_;
  std::unique_ptr<File> lock_file_;
  std::unique_ptr<Lock> lock_;
  StoreId store_id_{};
  uint64_t generation_ = 0;
  uint64_t epoch_ = 0;
  JournalName base_;
  uint64_t features_ = 0;  // incompatible ones, of SUPER and of every journal from now on
  JournalLink last_;
  CatalogState state_;
  uint64_t next_txid_ = 1;
  std::unique_ptr<Journal> journal_;
  std::vector<Record> unsynced_;  // in state_ already, not yet durable
  uint64_t last_seq_ = 0;
  std::vector<std::string> warnings_;
  std::string damage_;
  std::string head_damage_;
  std::unique_ptr<Manifest> head_manifest_;  // of a reader's open, for the first who asks
  RootRow root_pin_;                         // of `root_rows_`
  std::vector<RootRow> root_rows_;           // the newest that were asked for, of several ranks
  mutable std::mutex poison_mutex_;
  std::string poison_;  // why nothing more is acknowledged
  uint64_t queued_bytes_ = 0;
  int owner_ = 0;                      // the process that opened for writing: a forked child holds no lock
  uint64_t in_flight_ = 0;             // the txid of the Transaction that is under way
  std::vector<RootRow> dropped_rows_;  // of commits that were dropped beside it: its ranks may hold their shards
};

}  // namespace tierload
