// Reading history back out of the journals that are kept.
#include <algorithm>

#include "tierload/catalog.h"

namespace tierload {

std::vector<Record> Catalog::records_after(uint64_t lsn, std::vector<std::string>* warnings) const {
  std::vector<Record> newest_first;
  JournalLink until = last_;
  while (until.lsn > lsn && until.name != JournalName{}) {
    auto scan = scan_journal(*storage_, until.name, &store_id_, lock_ == nullptr);
    if (!scan) {
      if (!storage_->size(until.name.path('c')) && !storage_->size(until.name.path('m'))) break;  // collected
      throw CorruptError(storage_->name() + ": " + until.name.path('c') + " and its mirror are damaged: the history " +
                         "before record " + std::to_string(until.lsn) + " cannot be read");
    }
    // Of the current journal they are known; one with nothing but its snapshot may come from an open that failed.
    if (warnings != nullptr && until.name != last_.name && scan->records.size() > 1) {
      warnings->insert(warnings->end(), scan->warnings.begin(), scan->warnings.end());
    }
    auto& records = scan->records;
    // Only what the successor saw counts; bytes behind it may be those of a writer that was fenced.
    while (!records.empty() && records.back().lsn > until.lsn) records.pop_back();
    if (records.empty() || records.back().lsn != until.lsn) {
      throw CorruptError(storage_->name() + ": " + until.name.path('c') + " ends before record " +
                         std::to_string(until.lsn) + ", which its successor names");
    }
    for (auto record = records.rbegin(); record != records.rend() && record->lsn > lsn; ++record) {
      newest_first.push_back(std::move(*record));
    }
    until = scan->header.predecessor;
  }
  return newest_first;
}

CatalogState Catalog::state_at(uint64_t lsn) const {
  if (lsn > last_.lsn) {
    throw UsageError("LSN " + std::to_string(lsn) + " is not written yet; the newest is " + std::to_string(last_.lsn));
  }
  CatalogState state = state_;
  for (auto record = unsynced_.rbegin(); record != unsynced_.rend(); ++record) state.undo(*record);
  uint64_t reached = last_.lsn;
  for (const Record& record : records_after(lsn)) {
    state.undo(record);
    reached = record.lsn - 1;
  }
  if (reached != lsn) {
    throw UsageError("LSN " + std::to_string(lsn) + " is older than the kept history, which begins after " +
                     std::to_string(reached));
  }
  return state;
}

uint64_t Catalog::oldest_lsn() const {
  const auto records = records_after(0);
  return records.empty() ? last_.lsn : records.back().lsn - 1;
}

}  // namespace tierload
