// Reading history back out of the journals that are kept.
#include <algorithm>
#include <chrono>
#include <thread>

#include "tierload/catalog.h"

using namespace std::chrono_literals;

namespace tierload {

// A writer beside a reader may be between its two copies just now. Whatever one had at first, both have soon; what
// still differs below there, or differs while nobody writes, is worth a warning.
std::optional<JournalScan> Catalog::scan(JournalName name, const StoreId* expected) const {
  auto scan = scan_journal(*storage_, name, expected);
  const auto written_meanwhile = [&] {
    if (lock_ || !scan || scan->warnings.empty()) return false;
    try {
      return storage_->open("LOCK", OpenMode::read)->locked();
    } catch (const IoError& error) {
      if (!error.unusable_file()) throw;
      return false;  // a copy of a store may lack it
    }
  };
  for (const auto wait : {0ms, 1ms, 10ms, 100ms}) {
    if (!written_meanwhile()) break;
    const uint64_t settled = scan->end_offset;
    std::this_thread::sleep_for(wait);
    scan = scan_journal(*storage_, name, expected, settled);
  }
  return scan;
}

std::vector<Record> Catalog::records_after(uint64_t lsn, std::vector<std::string>* warnings) const {
  std::vector<Record> newest_first;
  JournalLink until = last_;
  while (until.lsn > lsn && until.name != JournalName{}) {
    auto scan = this->scan(until.name, &store_id_);
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
