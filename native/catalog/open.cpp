// Opening a store and recovering what it holds (docs/FORMAT.md section 10).
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "catalog/names.h"
#include "catalog/super.h"
#include "tierload/bytes.h"
#include "tierload/catalog.h"
#include "tierload/root.h"

namespace tierload {

struct Catalog::Found {
  std::optional<JournalScan> scan;
  JournalName newest;                   // of all files in wal/, complete or not
  std::string damage;                   // a newer journal than `scan` was lost after it had been acknowledged
  std::vector<JournalName> incomplete;  // newer than `scan`: remains of interrupted opens
};

CatalogOptions default_catalog_options() {
  CatalogOptions options;
  options.now = [] {
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
  };
  options.randomize = [](MutableBytes bytes) {
    if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      throw IoError("getrandom", "", errno);
    }
  };
  return options;
}

Catalog::Catalog(std::shared_ptr<Storage> storage, CatalogOptions options)
    : storage_(std::move(storage)), options_(std::move(options)) {}

Catalog::~Catalog() = default;

namespace {

// Only SUPER knows which release reads the store, so what a journal or manifest complains of is completed here.
template <typename Open>
std::unique_ptr<Catalog> naming_release(Storage& disk, Open open) {
  try {
    return open();
  } catch (const UnsupportedError& error) {
    const std::string what = error.what();
    const auto super = read_super(disk).best;  // throws by itself when SUPER is what is too new
    throw UnsupportedError(disk.name() + " needs tierload >= " + (super ? super->needs : "(unknown)") + ": " + what);
  }
}

}  // namespace

std::unique_ptr<Catalog> Catalog::open_for_writing(std::shared_ptr<Storage> storage, CatalogOptions options) {
  return naming_release(*storage, [&] { return recover(storage, std::move(options)); });
}

std::unique_ptr<Catalog> Catalog::open_for_reading(std::shared_ptr<Storage> storage, CatalogOptions options) {
  return naming_release(*storage, [&] { return look(storage, std::move(options)); });
}

std::unique_ptr<Catalog> Catalog::recover(std::shared_ptr<Storage> storage, CatalogOptions options) {
  std::unique_ptr<Catalog> catalog(new Catalog(std::move(storage), std::move(options)));
  Storage& disk = *catalog->storage_;
  catalog->owner_ = getpid();
  disk.make_dir("");
  catalog->lock(catalog->options_.take_over);
  for (const char* dir : {"wal", "man", "seg"}) disk.make_dir(dir);

  SuperScan super = read_super(disk);
  if (!super.best && list_journals(disk).empty()) {
    // A new store, or one whose creation was interrupted before it had any journal.
    Super fresh;
    catalog->options_.randomize(fresh.store_id);
    create_super(disk, fresh);
    super = read_super(disk);
  }
  if (!super.damage.empty()) catalog->warnings_.push_back(super.damage + "; it is rewritten");
  if (super.best) {
    catalog->store_id_ = super.best->store_id;
    catalog->generation_ = super.best->generation;
    catalog->epoch_ = super.best->epoch;
    catalog->base_ = super.best->base;
    catalog->features_ = super.best->features;
  } else {
    // Without SUPER the journals still say everything; only the check that none of them vanished is lost.
    const Found found = catalog->find_journal({}, nullptr);
    if (!found.scan) throw CorruptError(disk.name() + ": SUPER is damaged and no journal is whole");
    catalog->store_id_ = found.scan->header.store_id;
    catalog->features_ = found.scan->header.features;
    Super rebuilt{catalog->store_id_, 0, found.newest.epoch, {}, catalog->features_, {}};
    create_super(disk, rebuilt);
    catalog->generation_ = 1;
  }
  const auto journals = list_journals(disk);
  if (!journals.empty()) catalog->epoch_ = std::max(catalog->epoch_, journals.back().epoch);

  // Fence first: whatever an older writer acknowledged, it wrote before this, and so it is read below.
  const std::string needs = super.best ? super.best->needs : "";
  const auto publish = [&](JournalName base) {
    ++catalog->generation_;
    write_super(disk, {catalog->store_id_, catalog->generation_, catalog->epoch_, base, catalog->features_, needs});
    catalog->base_ = base;
  };
  if (++catalog->epoch_ >= uint64_t{1} << 32 || catalog->epoch_ == 0) {
    throw CorruptError(
        disk.name() + ": epoch " + std::to_string(catalog->epoch_) +
        " does not fit into file names: no store comes here by being opened, so SUPER or wal/ was forged");
  }
  publish(catalog->base_);
  disk.sync_dir("");  // whoever made SUPER and the directories may have been killed before it synced their names

  const Found found = catalog->find_journal(catalog->base_, &catalog->store_id_);
  if (found.scan) {
    catalog->replay(found, true);
    // The new journal's header names the last record of this one, which its writer may have had in one copy only, and
    // not synced, when it was killed: without this, the loss of that copy or a power cut would leave history with a
    // link to a record that is gone.
    if (catalog->options_.mutant != Mutant::loose_link) complete_journal(disk, *found.scan);
  } else if (!found.damage.empty()) {
    throw CorruptError(disk.name() + ": " + found.damage + ", and no older journal is whole");
  } else if (catalog->base_ != JournalName{}) {
    throw CorruptError(disk.name() + ": journal " + catalog->base_.path('c') + " and its mirror are damaged");
  }
  catalog->check_head(false);
  catalog->next_txid_ = catalog->state_.next_txid();
  if (catalog->options_.mutant == Mutant::base_before_journal) publish({catalog->epoch_, 0});
  catalog->start_journal({catalog->epoch_, 0});
  publish({catalog->epoch_, 0});
  for (const JournalName& name : found.incomplete) {
    for (const char copy : {'c', 'm'}) disk.remove(name.path(copy));
  }
  catalog->remove_leftovers(found);
  return catalog;
}

std::unique_ptr<Catalog> Catalog::look(std::shared_ptr<Storage> storage, CatalogOptions options) {
  std::unique_ptr<Catalog> catalog(new Catalog(std::move(storage), std::move(options)));
  Storage& disk = *catalog->storage_;
  constexpr int attempts = 100;  // a writer may roll its journal between our look at the directory and our reading
  for (int attempt = 1;; ++attempt) {
    const SuperScan super = read_super(disk);
    const auto journals = list_journals(disk);
    if (!super.present && journals.empty()) throw IoError("open", disk.name(), ENOENT);
    JournalName base;
    const StoreId* expected = nullptr;
    if (super.best) {
      catalog->store_id_ = super.best->store_id;
      catalog->epoch_ = super.best->epoch;
      base = super.best->base;
      expected = &catalog->store_id_;
    }
    Found found = catalog->find_journal(base, expected);
    if (found.scan && catalog->options_.mutant != Mutant::no_relog) {
      // What is shown must survive a power cut, and its writer may have been killed before it synced.
      ::tierload::sync_journal(disk, found.scan->header.name);
    }
    if (!found.scan && base != JournalName{}) {
      if (attempt < attempts && read_super(disk).best && read_super(disk).best->base != base) continue;
      const std::string lost = "journal " + base.path('c') + " and its mirror are damaged";
      found = catalog->find_journal({}, expected);
      if (!found.scan) throw CorruptError(disk.name() + ": " + lost + ", and so is every older one");
      catalog->damage_ = lost + "; shown is the state of " + found.scan->header.name.path('c');
    }
    if (!super.damage.empty()) catalog->warnings_.push_back(super.damage + "; opening for writing mends it");
    if (found.scan) {
      catalog->store_id_ = found.scan->header.store_id;
      catalog->replay(found, false);
    }
    break;
  }
  catalog->check_head(true);
  return catalog;
}

Catalog::Found Catalog::find_journal(JournalName base, const StoreId* expected) {
  Found found;
  auto names = list_journals(*storage_);
  if (!names.empty()) found.newest = names.back();
  std::reverse(names.begin(), names.end());
  for (const JournalName& name : names) {
    if (name < base) break;
    found.scan = scan(name, expected);
    if (found.scan && options_.mutant == Mutant::damage_is_tail) found.scan->damage.clear();
    if (found.scan && found.scan->records.empty()) {
      found.damage = found.scan->damage;
      found.scan.reset();
      continue;
    }
    if (found.scan) break;
    found.incomplete.push_back(name);
  }
  return found;
}

void Catalog::replay(const Found& found, bool for_writing) {
  const JournalScan& scan = *found.scan;
  std::string damage = found.damage.empty() ? scan.damage : found.damage;
  state_ = CatalogState::decode(scan.records.front().payload);
  last_ = scan.end;
  for (size_t i = 1; i < scan.records.size(); ++i) {
    try {
      if (scan.records[i].type == RecordType::snapshot) throw CorruptError("a second SNAPSHOT");
      state_.apply(scan.records[i]);
    } catch (const CorruptError& error) {
      // Whole, but not what follows from the records before it: nothing from here on can be believed.
      damage = scan.header.name.path('c') + ": record " + std::to_string(scan.records[i].lsn) + ": " + error.what();
      last_.lsn = scan.records[i].lsn - 1;
      break;
    }
  }
  warnings_.insert(warnings_.end(), scan.warnings.begin(), scan.warnings.end());
  if (damage.empty()) return;
  if (for_writing) {
    throw CorruptError(storage_->name() + ": " + damage +
                       ". The store opens for reading at the state before it; nothing was changed");
  }
  damage_ = damage;
}

CommitPtr Catalog::commit_of(uint64_t txid) const {
  CommitPtr commit = state_.find(txid);
  if (!commit) throw UsageError("there is no commit " + std::to_string(txid));
  return commit;
}

std::string Catalog::check_commit(uint64_t txid) const {
  std::unique_ptr<Manifest> manifest;
  return check(*commit_of(txid), true, manifest);
}

std::vector<RootRow> Catalog::root(uint64_t txid) {
  const CommitPtr commit = commit_of(txid);
  if (commit->ranks == 1) return {commit->root};
  // Who loads asks for one shard after the other.
  if (root_pin_ != commit->root) {
    root_rows_ = read_root(*storage_, commit->root, commit->ranks, nullptr);
    root_pin_ = commit->root;
  }
  return root_rows_;
}

std::unique_ptr<Manifest> Catalog::open_manifest(uint64_t txid, uint32_t rank) {
  const CommitPtr commit = commit_of(txid);
  if (rank >= commit->ranks) {
    throw UsageError("commit " + std::to_string(txid) + " is by " + std::to_string(commit->ranks) +
                     " ranks, so it has no shard of rank " + std::to_string(rank));
  }
  if (head_manifest_ && commit == state_.head() && rank == 0) {
    std::unique_ptr<Manifest> checked = std::move(head_manifest_);
    if (checked->pin()) return checked;
  }
  return Manifest::open(*storage_, root(txid)[rank], commit->ranks, nullptr);
}

namespace {

// Whether a copy of the shard is there with its length.
bool present(Storage& storage, const RootRow& row) {
  const std::string path = manifest_path(row.epoch, row.txid, row.rank);
  const uint64_t length = manifest_file_length(row);
  return storage.size(path) == length || storage.size(path + ".m") == length;
}

std::string check_segments(Storage& storage, const Manifest& manifest) {
  for (const SegmentRow& segment : manifest.segments()) {
    const auto size = storage.size(segment.path());
    if (!size) return segment.path() + " is missing";
    if (*size != segment.size) {
      return segment.path() + " has " + std::to_string(*size) + " bytes instead of " + std::to_string(segment.size);
    }
  }
  return "";
}

}  // namespace

// What is wrong with a commit; `manifest` becomes that of rank 0. Not `whole`: of the other ranks only that their
// shards are there, since an open must not read those of thousands.
std::string Catalog::check(const Commit& commit, bool whole, std::unique_ptr<Manifest>& manifest) const {
  try {
    for (const RootRow& row : read_root(*storage_, commit.root, commit.ranks, nullptr)) {
      if (row.rank > 0 && !whole) {
        if (!present(*storage_, row)) {
          return manifest_path(row.epoch, row.txid, row.rank) + " and its mirror are missing or have another length";
        }
        continue;
      }
      auto shard = Manifest::open(*storage_, row, commit.ranks, nullptr);
      if (std::string problem = check_segments(*storage_, *shard); !problem.empty()) return problem;
      if (row.rank == 0) manifest = std::move(shard);
    }
  } catch (const CorruptError& error) {
    return error.what();
  } catch (const IoError& error) {
    if (!error.unusable_file() || error.code == EIO) throw;
    return error.what();
  }
  return "";
}

void Catalog::check_head(bool keep) {
  const CommitPtr head = state_.head();
  if (!head) return;
  std::unique_ptr<Manifest> manifest;
  head_damage_ = check(*head, false, manifest);
  if (keep && head_damage_.empty()) head_manifest_ = std::move(manifest);
  if (head_manifest_) head_manifest_->unpin();
}

void Catalog::lock(bool take_over) {
  constexpr int attempts = 100;  // somebody may replace LOCK between our opening and locking it
  for (int attempt = 0; attempt < attempts; ++attempt) {
    try {
      lock_file_ = storage_->open("LOCK", OpenMode::read_write);
    } catch (const IoError& error) {
      if (error.code != ENOENT) throw;
      try {
        lock_file_ = storage_->open("LOCK", OpenMode::create);
      } catch (const IoError& race) {
        if (race.code != EEXIST) throw;
        continue;
      }
    }
    lock_ = lock_file_->try_lock(true);
    if (lock_ && !lock_file_->linked()) continue;
    if (lock_) {
      lock_file_->truncate(0);
      lock_file_->write(0, as_bytes(options_.holder));
      return;
    }
    if (!take_over) {
      std::string holder(lock_file_->size(), '\0');
      holder.resize(lock_file_->read(0, std::as_writable_bytes(std::span(holder))));
      throw BusyError(storage_->name() + " is held by another process", holder);
    }
    // The frozen holder keeps its lock on a file that has no name any more; its epoch fences it.
    storage_->remove("LOCK");
  }
  throw BusyError(storage_->name() + ": LOCK keeps changing hands", "");
}

void Catalog::start_journal(JournalName name) {
  JournalHeader header;
  header.store_id = store_id_;
  header.name = name;
  header.first_lsn = last_.lsn + 1;
  header.predecessor = last_;
  header.features = features_;
  options_.randomize(std::as_writable_bytes(std::span(&header.salt, 1)));
  journal_ = std::make_unique<Journal>(*storage_, header, state_.encode(), options_.now(),
                                       Journal::Options{options_.journal_fill_bytes, options_.mutant});
  if (options_.mutant != Mutant::no_journal_directory_sync) storage_->sync_dir("wal");
  last_ = journal_->end();
}

void Catalog::remove_leftovers(const Found& found) {
  // Files of transactions that never committed. What an aborted one left below the newest commit waits for collect().
  for (const char* dir : {"man", "seg"}) {
    for (const std::string& file : storage_->list(dir)) {
      const auto name = parse_data_name(file);
      const bool ours = name && (*dir == 'm' ? name->of_manifest() || name->of_root() : name->of_segment());
      if (ours && name->epoch < epoch_ && name->txid >= state_.next_txid()) {
        storage_->remove(std::string(dir) + "/" + file);
      }
    }
  }
  if (!found.scan) return;
  // The previous journal is history now: cut the zeros (or the torn tail) behind its end.
  const uint64_t end = round_up(found.scan->end_offset, sector);
  for (const char copy : {'c', 'm'}) {
    std::unique_ptr<File> file;
    try {
      file = storage_->open(found.scan->header.name.path(copy), OpenMode::read_write);
    } catch (const IoError& error) {
      if (!error.unusable_file()) throw;  // its mirror was used
    }
    if (file && file->size() > end) file->truncate(end);
  }
}

}  // namespace tierload
