#include "tierload/shard.h"

#include <unistd.h>

#include "catalog/super.h"

namespace tierload {

ShardWriter::ShardWriter(Storage& storage, const Attempt& attempt, uint32_t rank, WriterHealth& health)
    : storage_(storage), attempt_(attempt), rank_(rank), health_(health), owner_(getpid()) {}

void ShardWriter::check_usable() const {
  health_.check_usable();
  if (failed_) throw UsageError("this save failed earlier, so it can only be given up");
}

void ShardWriter::fail(const IoError& error, bool sync_failed) {
  failed_ = true;
  health_.fail(error, sync_failed);
}

bool ShardWriter::syncs() const { return rank_ == 0 || attempt_.mutant != Mutant::no_shard_sync; }

void ShardWriter::open_segment(SegmentRow& row, uint64_t expected, bool with_gaps) {
  check_usable();
  end_segment();
  wrote_something();
  row = {attempt_.epoch, attempt_.txid, rank_, segments_++, 0};
  const std::string path = row.path();
  segment_ = storage_.open(path, OpenMode::create);
  paths_.push_back(path);
  appender_ =
      with_gaps ? storage_.Storage::append(*segment_, path, expected) : storage_.append(*segment_, path, expected);
}

void ShardWriter::skip(uint64_t bytes) {
  check_usable();
  appender_->skip(bytes);
}

void ShardWriter::append(std::span<const Bytes> parts) {
  check_usable();
  try {
    appender_->append(parts);
  } catch (const IoError& error) {
    fail(error, false);
    throw;
  }
}

// A full segment is made durable at once, so that one open file is enough, and flushes are spread.
void ShardWriter::end_segment() {
  if (!segment_) return;
  try {
    appender_->finish();
  } catch (const IoError& error) {
    fail(error, false);
    throw;
  }
  try {
    if (attempt_.mutant != Mutant::no_segment_sync && syncs()) segment_->sync();
  } catch (const IoError& error) {
    fail(error, true);
    throw;
  }
  appender_ = nullptr;
  segment_ = nullptr;
}

RootRow ShardWriter::write_manifest(ManifestParts parts) {
  check_usable();
  parts.rank = rank_;
  parts.world_size = attempt_.ranks;
  parts.epoch = attempt_.epoch;
  parts.txid = attempt_.txid;
  const SealedFile sealed = encode_manifest(parts);
  const std::string path = manifest_path(parts.epoch, parts.txid, rank_);
  wrote_something();
  for (const std::string& copy : {path, path + ".m"}) {
    manifest_files_.push_back(storage_.open(copy, OpenMode::create));
    paths_.push_back(copy);
    try {
      manifest_files_.back()->write(0, sealed.file);
    } catch (const IoError& error) {
      fail(error, false);
      throw;
    }
  }
  RootRow row;
  row.rank = rank_;
  row.epoch = parts.epoch;
  row.txid = parts.txid;
  row.body_length = sealed.body_length;
  row.digest = sealed.digest;
  row_ = row;
  return row;
}

void ShardWriter::refer(const RootRow& row) {
  check_usable();
  if (!paths_.empty()) throw UsageError("a rank that wrote something has changed: it needs a manifest of its own");
  if (row.rank != rank_ || row.txid >= attempt_.txid) {
    throw UsageError("rank " + std::to_string(rank_) + " of transaction " + std::to_string(attempt_.txid) +
                     " cannot have the shard of rank " + std::to_string(row.rank) + " of transaction " +
                     std::to_string(row.txid));
  }
  referred_ = Manifest::open(storage_, row, attempt_.ranks, nullptr);
  row_ = row;
}

void ShardWriter::wrote_something() {
  if (attempt_.mutant != Mutant::flush_once) flushed_ = false;
}

void ShardWriter::flush() {
  check_usable();
  if (flushed_) return;
  const Mutant mutant = attempt_.mutant;
  end_segment();
  try {
    if (mutant != Mutant::no_manifest_sync && syncs()) {
      // In pairs, the mirror second.
      for (size_t i = 0; i < manifest_files_.size(); ++i) {
        if (mutant != Mutant::one_manifest_sync || i % 2 == 0) manifest_files_[i]->sync();
      }
    }
    if (mutant != Mutant::no_directory_sync && syncs()) {
      if (segments_ > 0) storage_.sync_dir("seg");
      if (!manifest_files_.empty()) storage_.sync_dir("man");
    }
  } catch (const IoError& error) {
    fail(error, true);
    throw;
  }
  manifest_files_.clear();
  flushed_ = true;
}

const RootRow& ShardWriter::row() const {
  if (!row_) throw UsageError("this save has no manifest yet");
  return *row_;
}

void ShardWriter::remove() {
  if (owner_ != getpid()) return;
  appender_ = nullptr;
  segment_ = nullptr;
  manifest_files_.clear();
  for (const std::string& path : paths_) {
    try {
      storage_.remove(path);
    } catch (const IoError&) {
      // A collection removes it another time.
    }
  }
  paths_.clear();
}

RankWriter::RankWriter(std::shared_ptr<Storage> storage, const StoreId& store_id, const Attempt& attempt, uint32_t rank)
    : storage_(std::move(storage)),
      store_id_(store_id),
      attempt_(attempt),
      shard_(*storage_, attempt, rank, static_cast<WriterHealth&>(*this)) {
  if (rank == 0 || rank >= attempt.ranks || attempt.ranks > ranks_max) {
    throw UsageError("rank " + std::to_string(rank) + " of " + std::to_string(attempt.ranks) +
                     " does not write beside rank 0");
  }
}

RankWriter::~RankWriter() {
  if (!prepared_) shard_.remove();
}

ShardWriter& RankWriter::shard() {
  if (prepared_) throw UsageError("this rank has handed its shard in");
  return shard_;
}

void RankWriter::prepare() {
  if (prepared_) return;
  shard_.row();
  shard_.flush();
  if (attempt_.mutant != Mutant::no_fence) check_epoch(*storage_, store_id_, attempt_.epoch);
  prepared_ = true;
}

const RootRow& RankWriter::row() const {
  if (!prepared_) throw UsageError("a rank hands its row in when its shard is durable: flush it first");
  return shard_.row();
}

void RankWriter::check_usable() const {
  if (!poison_.empty()) {
    throw PoisonedError(storage_->name() + ": this rank failed earlier (" + poison_ + ") and hands nothing in");
  }
}

void RankWriter::fail(const IoError& error, bool sync_failed) {
  if (sync_failed || !error.out_of_space()) poison_ = error.what();
}

std::optional<StoreEpoch> store_epoch(Storage& storage) {
  const SuperScan super = read_super(storage);
  if (!super.best) return std::nullopt;
  return StoreEpoch{super.best->store_id, super.best->epoch};
}

void check_epoch(Storage& storage, const StoreId& store_id, uint64_t epoch) {
  const auto now = store_epoch(storage);
  const auto fenced = [&](const std::string& why) {
    throw FencedError(storage.name() + ": " + why + "; what this rank wrote does not count");
  };
  if (!now) fenced("its SUPER is gone");
  if (now->store_id != store_id) fenced("another store stands in its place");
  if (now->epoch > epoch) {
    fenced("another writer took the store over (epoch " + std::to_string(now->epoch) + ", the save's is " +
           std::to_string(epoch) + ")");
  }
  if (now->epoch < epoch) {
    fenced("this machine sees epoch " + std::to_string(now->epoch) + ", the save's is " + std::to_string(epoch) +
           ": it has another directory, or an old view of it");
  }
}

}  // namespace tierload
