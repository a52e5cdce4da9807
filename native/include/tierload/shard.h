// What one rank writes of one attempt to commit: its segments and its manifest shard (docs/FORMAT.md section 9).
//
// Rank 0 writes through the ShardWriter of its Transaction (tierload/catalog.h). The other ranks of a job have no
// catalog: each has a RankWriter, whose files are named by rank 0's epoch and txid. A shard that is whole and durable
// is the rank's PREPARE: nothing of it exists before rank 0's COMMIT, which pins it by the row that the rank handed in.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tierload/error.h"
#include "tierload/journal.h"
#include "tierload/manifest.h"

namespace tierload {

// Who answers for a writer as a whole: a failure of one of its files may be the end of all that it does.
class WriterHealth {
 public:
  virtual ~WriterHealth() = default;
  // Throws when nothing more may be written. For any thread.
  virtual void check_usable() const = 0;
  // A call on a file failed. Any failure but a full disk is the writer's end, and so is a failed sync.
  virtual void fail(const IoError& error, bool sync_failed) = 0;
};

// An attempt to commit, as every rank knows it.
struct Attempt {
  uint64_t epoch = 0;
  uint64_t txid = 0;
  uint32_t ranks = 1;
  Mutant mutant = Mutant::none;
};

class ShardWriter {
 public:
  // Files are created, never opened: two writers of one name cannot be.
  ShardWriter(Storage& storage, const Attempt& attempt, uint32_t rank, WriterHealth& health);
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Begins a new segment file, for about `expected` bytes; the one before is complete. `row.size` is filled in by the
  // caller. After a failure here and below the attempt can only be given up. `with_gaps`: skip() may be called.
  void open_segment(SegmentRow& row, uint64_t expected, bool with_gaps = false);
  // Puts whole blocks of 4 KiB behind what the open segment has; the parts may be reused when it returns. flush() ends
  // a segment: what comes after it needs a new one.
  void append(std::span<const Bytes> parts);
  // Somebody else writes so many bytes into the file, before the segment ends.
  void skip(uint64_t bytes);
  // Makes the open segment, if there is one, complete and durable; flush() does it too.
  void end_segment();
  // Writes the shard and its mirror. Fills in rank, world size, epoch and txid of `parts`.
  RootRow write_manifest(ManifestParts parts);
  // Instead: the shard is that of an earlier commit, and `row` is the one that its root has. The shard is verified and
  // held until the attempt is over, so that no collection takes it. Throws UsageError when this one wrote something.
  void refer(const RootRow& row);
  // Makes everything that was written so far durable: slow, and needs no lock.
  void flush();

  // What the commit's root says of this rank. Throws UsageError before write_manifest() or refer().
  const RootRow& row() const;
  // Removes what was written. Files that cannot be removed are garbage that no commit names.
  void remove();

 private:
  void wrote_something();
  void check_usable() const;
  void fail(const IoError& error, bool sync_failed);
  bool syncs() const;

  Storage& storage_;
  const Attempt attempt_;
  const uint32_t rank_;
  WriterHealth& health_;
  const int owner_;  // the process: a forked child's copy removes nothing
  uint32_t segments_ = 0;
  bool flushed_ = false;           // nothing was written since
  bool failed_ = false;            // what the files hold is in doubt
  std::unique_ptr<File> segment_;  // the open one
  std::unique_ptr<Appender> appender_;
  std::vector<std::unique_ptr<File>> manifest_files_;  // not synced yet
  std::vector<std::string> paths_;
  std::unique_ptr<Manifest> referred_;
  std::optional<RootRow> row_;
};

// The part of a rank other than 0, from its first page until its row is handed in. Destroyed before prepare(), it
// removes what it wrote. After that only rank 0 knows whether the attempt was committed, so the files stay: of an
// attempt that was given up rank 0 removes them, or whoever opens or collects later.
class RankWriter : private WriterHealth {
 public:
  // `store_id` is the store's where the attempt was begun. Throws UsageError when `rank` is not one of 1 to ranks - 1.
  RankWriter(std::shared_ptr<Storage> storage, const StoreId& store_id, const Attempt& attempt, uint32_t rank);
  ~RankWriter() override;
  RankWriter(const RankWriter&) = delete;
  RankWriter& operator=(const RankWriter&) = delete;

  // Throws UsageError after prepare().
  ShardWriter& shard();
  // Makes the shard durable and looks for another writer: only then is there a row to hand in. Throws FencedError.
  void prepare();
  bool prepared() const { return prepared_; }
  // The row to hand in. Throws UsageError before prepare().
  const RootRow& row() const;

 private:
  void check_usable() const override;
  void fail(const IoError& error, bool sync_failed) override;

  const std::shared_ptr<Storage> storage_;
  const StoreId store_id_;
  const Attempt attempt_;
  std::string poison_;  // why nothing more is written
  bool prepared_ = false;
  ShardWriter shard_;
};

struct StoreEpoch {
  StoreId store_id{};
  uint64_t epoch = 0;  // the newest that was handed out
};
// What SUPER says now; nothing where there is no store, or none whose SUPER is whole. Throws UnsupportedError.
std::optional<StoreEpoch> store_epoch(Storage& storage);

// Re-reads SUPER. Throws FencedError unless the store is still the one of `store_id` and `epoch` the newest.
void check_epoch(Storage& storage, const StoreId& store_id, uint64_t epoch);

}  // namespace tierload
