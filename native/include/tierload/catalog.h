// What exists and what is current: opening, committing, tagging, freeing. The only implementation of
// docs/FORMAT.md sections 9 to 11. Every file operation goes through Storage, so the crash tests run this code.
//
// Threads: one at a time, except for the slow part of a save. Transaction::open_segment, append, write_manifest and
// flush may run on one thread while others call the catalog, one at a time, by a lock that is the caller's and that
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

// One attempt to commit; the catalog outlives it. Destroying it before commit() removes what it wrote. When the catalog
// is closed meanwhile, every call but the destruction throws PoisonedError.
//
// Pages of a parent that the new commit refers to have to stay until commit() has returned: whoever writes keeps the
// parent's Manifest open so long. It may be any commit's, even one that a collection drops meanwhile.
class Transaction {
 public:
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  uint64_t txid() const { return txid_; }
  // Begins a new segment file of rank 0, for about `expected` bytes; the one before is complete. `row.size` is filled
  // in by the caller. After a failure here and below the Transaction can only be destroyed; any but a full disk poisons
  // the catalog.
  void open_segment(SegmentRow& row, uint64_t expected);
  // Puts whole blocks of 4 KiB behind what the open segment has; the parts may be reused when it returns. flush() ends
  // a segment: what comes after it needs a new one.
  void append(std::span<const Bytes> parts);
  // Makes the open segment, if there is one, complete and durable; commit() does it too.
  void end_segment();
  // Writes one rank's manifest shard and its mirror. Fills in epoch, txid of `parts`.
  RootRow write_manifest(ManifestParts parts);
  // Makes everything that was written so far durable: slow, and needs no lock.
  void flush();
  // Flushes, unless nothing was written since the last flush(), and commits, with `tags` moved to the new commit in the
  // same sync group. `draft` needs step, meta, raw_bytes, written_bytes, root and changes. On a full disk nothing has
  // happened, and records that wait for a sync go on waiting.
  CommitPtr commit(Commit draft, const std::vector<std::string>& tags = {});

 private:
  friend class Catalog;
  Transaction(Catalog& catalog, uint64_t txid);
  void wrote_something();
  void check_usable() const;
  void fail(const IoError& error, bool sync_failed);
  Catalog& catalog_;
  uint64_t txid_;
  uint32_t segments_ = 0;
  bool flushed_ = false;  // nothing was written since
  bool failed_ = false;   // what the files hold is in doubt
  bool committed_ = false;
  std::unique_ptr<File> segment_;  // the open one
  std::unique_ptr<Appender> appender_;
  std::vector<std::unique_ptr<File>> manifest_files_;  // not synced yet
  std::vector<std::string> paths_;
};

class Catalog {
 public:
  // Creates the store when there is none. Throws BusyError, CorruptError (nothing was changed except the epoch),
  // UnsupportedError, IoError.
  static std::unique_ptr<Catalog> open_for_writing(std::shared_ptr<Storage> storage, CatalogOptions options);
  // Throws IoError(ENOENT) when there is no store. A damaged store opens at the newest state before the damage, which
  // damage() then describes.
  static std::unique_ptr<Catalog> open_for_reading(std::shared_ptr<Storage> storage, CatalogOptions options);
  ~Catalog();

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
  // What is wrong with the manifest or segments of the commit that was the head at the open, or "". The store works:
  // older commits can be loaded and rolled back to.
  const std::string& head_damage() const { return head_damage_; }
  // The same of any commit. Pages are not read.
  std::string check_commit(uint64_t txid) const;
  // The manifest of a commit by one rank, verified: when the commit is the head, just now or, once, when a reader
  // opened.
  std::unique_ptr<Manifest> open_manifest(uint64_t txid);

  // Room for COMMIT is kept in the journal from here on, whatever else is written into it, as far as the disk has it.
  // Throws UsageError while another one lives.
  std::unique_ptr<Transaction> begin();
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
  void check_usable() const;

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
  std::string check(const Commit& commit, std::unique_ptr<Manifest>& manifest) const;
  void lock(bool take_over);
  void start_journal(JournalName name);
  void roll_if_long();
  bool remove_for_good(JournalName name);
  void sync_records(size_t kept_on_full_disk);
  void sync_journal(size_t kept_on_full_disk);
  void check_tag_name(const std::string& name) const;
  void remove_leftovers(const Found& found);
  void keep_commit_room();
  void take_back(size_t kept);
  void fail(const IoError& error, bool sync_failed);
  void poison(std::string why);
  std::string poison() const;
  uint64_t append_tag(const std::string& name, uint64_t txid);
  uint64_t append(RecordType type, uint64_t txid, const std::vector<std::byte>& payload);

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
  mutable std::mutex poison_mutex_;
  std::string poison_;  // why nothing more is acknowledged
  uint64_t queued_bytes_ = 0;
  int owner_ = 0;           // the process that opened for writing: a forked child holds no lock
  uint64_t in_flight_ = 0;  // the txid of the Transaction that is under way
};

}  // namespace tierload
