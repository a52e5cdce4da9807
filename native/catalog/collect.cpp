// Freeing what no commit references: mark and sweep (docs/FORMAT.md section 11).
#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <tuple>

#include "catalog/names.h"
#include "tierload/bytes.h"
#include "tierload/catalog.h"
#include "tierload/root.h"

namespace tierload {
namespace {

using RootId = std::pair<uint64_t, uint64_t>;                 // epoch, txid
using ManifestId = std::tuple<uint64_t, uint64_t, uint32_t>;  // epoch, txid, rank

// Parts of segments that some live manifest references: path -> offset -> length in whole sectors.
using ExtentsBySegment = std::map<std::string, std::map<uint64_t, uint64_t>>;

void mark(const Manifest& manifest, ExtentsBySegment& used) {
  const auto segments = manifest.segments();
  for (const PageRow& page : manifest.pages()) {
    used[segments[page.segment].path()][page.offset] = round_up(page.stored_length, sector);
  }
}

// Gives everything between the live extents of a segment back; returns how many bytes that freed.
uint64_t punch_gaps(Storage& storage, const std::string& path, const std::map<uint64_t, uint64_t>& extents) {
  uint64_t live = 0;
  for (const auto& [offset, length] : extents) live += length;
  if (storage.allocated(path) <= live) return 0;
  const auto file = storage.open(path, OpenMode::read_write);
  const uint64_t before = storage.allocated(path);
  uint64_t at = 0;
  for (const auto& [offset, length] : extents) {
    if (offset > at && !file->punch(at, offset - at)) return 0;
    at = std::max(at, offset + length);
  }
  const uint64_t size = file->size();
  if (size > at) file->punch(at, size - at);
  const uint64_t after = storage.allocated(path);
  return before > after ? before - after : 0;
}

}  // namespace

CollectResult Catalog::collect(const std::vector<uint64_t>& drop) {
  check_usable();
  std::set<uint64_t> dropped(drop.begin(), drop.end());
  std::vector<CommitPtr> entries;
  for (const uint64_t txid : dropped) {
    const CommitPtr commit = state_.find(txid);
    if (!commit) throw UsageError("there is no commit " + std::to_string(txid) + " to drop");
    if (commit == state_.head()) throw UsageError("the head is never dropped");
    entries.push_back(commit);
  }
  for (const auto& [name, txid] : state_.tags()) {
    if (dropped.contains(txid)) throw UsageError("commit " + std::to_string(txid) + " is tagged '" + name + "'");
  }
  for (const CommitPtr& commit : entries) {
    if (!commit->rollback) continue;
    // A rollback's record is what says that the commits it left behind are not part of the line.
    const auto& commits = state_.commits();
    for (auto it = commits.upper_bound(commit->source); it != commits.end() && it->first < commit->txid; ++it) {
      if (!dropped.contains(it->first)) {
        throw UsageError("rollback " + std::to_string(commit->txid) + " is kept while commit " +
                         std::to_string(it->first) + ", which it left behind, is");
      }
    }
  }
  const size_t queued = unsynced_.size();
  keep_rows(entries);
  if (!entries.empty()) append(RecordType::collect, 0, encode_collect(entries));
  CollectResult result;
  if (options_.mutant == Mutant::early_reuse) sweep(result);
  sync_records(queued);
  sweep(result);
  remove_old_journals(result);
  roll_if_long();
  return result;
}

void Catalog::keep_rows(const std::vector<CommitPtr>& dropped) {
  if (in_flight_ == 0) return;
  for (const CommitPtr& commit : dropped) {
    try {
      const auto rows = read_root(*storage_, commit->root, commit->ranks, nullptr);
      dropped_rows_.insert(dropped_rows_.end(), rows.begin(), rows.end());
    } catch (const CorruptError&) {
      // What cannot be read vouches for nothing, and dropping it is right.
    }
  }
}

void Catalog::sweep(CollectResult& result) {
  // A newer writer's files are not ours to judge, nor are those of the save that is under way: what it refers to beside
  // them is live by its parent's manifest, which it holds as a reader does.
  const bool spare = options_.mutant != Mutant::in_flight_is_garbage;
  const auto ours = [&](const DataName& name) {
    return name.epoch < epoch_ || (name.epoch == epoch_ && !(spare && in_flight_ == name.txid));
  };
  const auto remove = [&](const std::string& path) {
    result.freed_bytes += storage_->allocated(path);
    result.removed_files += storage_->remove(path) ? 1 : 0;
  };
  // What is live: every root and manifest of a commit, and every other one that a reader holds. When one of them cannot
  // be read, nothing is freed.
  std::set<RootId> live_roots;
  std::set<ManifestId> live;
  ExtentsBySegment used;
  for (const auto& [txid, commit] : state_.commits()) {
    const bool has_file = commit->ranks > 1;
    if (has_file && !live_roots.emplace(commit->root.epoch, commit->root.txid).second) continue;
    for (const RootRow& row : read_root(*storage_, commit->root, commit->ranks, &warnings_)) {
      if (live.emplace(row.epoch, row.txid, row.rank).second) {
        mark(*Manifest::open(*storage_, row, commit->ranks, &warnings_), used);
      }
    }
  }
  std::map<ManifestId, std::vector<std::string>> orphans;
  for (const std::string& file : storage_->list("man")) {
    const auto name = parse_data_name(file);
    if (!name || !ours(*name)) continue;
    if (name->of_root() && !live_roots.contains({name->epoch, name->txid})) {
      // A reader has read it, whole, before it takes the first lock.
      remove("man/" + file);
    }
    if (!name->of_manifest()) continue;
    const ManifestId id{name->epoch, name->txid, name->rank};
    if (!live.contains(id)) orphans[id].push_back("man/" + file);
  }
  for (const auto& [id, paths] : orphans) {
    // The locks are kept until the files are gone, so that no reader comes to hold one of them meanwhile.
    std::vector<std::unique_ptr<Lock>> locks;
    for (const std::string& path : paths) {
      auto lock = storage_->open(path, OpenMode::read_write)->try_lock(true);
      if (!lock) break;
      locks.push_back(std::move(lock));
    }
    if (locks.size() == paths.size()) {
      for (const std::string& path : paths) remove(path);
    } else {
      locks.clear();
      ++result.pinned;
      mark(*Manifest::open_unpinned(*storage_, std::get<0>(id), std::get<1>(id), std::get<2>(id)), used);
    }
  }
  // Segments are judged by the manifests that are live, so what a crash leaves here is found by the next collection.
  for (const std::string& file : storage_->list("seg")) {
    const auto name = parse_data_name(file);
    if (!name || !name->of_segment() || !ours(*name)) continue;
    const std::string path = "seg/" + file;
    const auto found = used.find(path);
    if (found == used.end()) {
      remove(path);
    } else {
      result.freed_bytes += punch_gaps(*storage_, path, found->second);
    }
  }
}

void Catalog::remove_old_journals(CollectResult& result) {
  uint64_t oldest = last_.lsn;
  for (const auto& [txid, commit] : state_.commits()) oldest = std::min(oldest, commit->lsn);
  // A journal is needed while it holds records after the oldest commit: rollbacks undo them.
  bool needed = true;
  for (JournalLink link = last_; link.name != JournalName{};) {
    const auto scan = this->scan(link.name, &store_id_);
    if (!scan) break;
    const JournalName name = link.name;
    link = scan->header.predecessor;
    if (!needed) {
      for (const char copy : {'c', 'm'}) {
        if (!storage_->size(name.path(copy))) continue;
        result.freed_bytes += storage_->allocated(name.path(copy));
        result.removed_files += storage_->remove(name.path(copy)) ? 1 : 0;
      }
    }
    needed = needed && scan->header.first_lsn > oldest;
  }
}

}  // namespace tierload
