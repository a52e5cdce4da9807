#include "tierload/journal.h"

#include <algorithm>
#include <cerrno>

#include "journal/record.h"
#include "tierload/bytes.h"

namespace tierload {

Journal::Journal(Storage& storage, const JournalHeader& header, Bytes snapshot, uint64_t time, const Options& options)
    : header_(header), options_(options), end_(header.predecessor), next_lsn_(header.first_lsn) {
  main_ = storage.open(header.name.path('c'), OpenMode::create);
  mirror_ = storage.open(header.name.path('m'), OpenMode::create);
  write_both(0, encode_header(header));
  offset_ = sector;
  filled_ = sector;
  append(RecordType::snapshot, 0, time, snapshot);
  sync();
}

uint64_t Journal::append(RecordType type, uint64_t txid, uint64_t time, Bytes payload) {
  if (payload.size() > record_payload_max) {
    throw UsageError("a journal record of " + std::to_string(payload.size()) + " bytes is over the limit of " +
                     std::to_string(record_payload_max) + ": keep recorded values and metrics small");
  }
  Record record{type, 0, next_lsn_++, txid, time, {payload.begin(), payload.end()}};
  queue_bytes_ += record_size(payload.size());
  queue_.push_back(std::move(record));
  return queue_.back().lsn;
}

void Journal::reserve(uint64_t bytes) {
  if (poisoned_) throw PoisonedError("the journal failed earlier: open the store anew");
  const uint64_t needed = round_up(offset_ + queue_bytes_ + bytes, sector);
  if (needed <= filled_) return;
  const std::vector<std::byte> zeros(needed + options_.fill_bytes - filled_);
  try {
    write_both(filled_, zeros);
  } catch (const IoError& error) {
    // Zeros beyond the end mean nothing, so a full disk leaves the journal as it was.
    poisoned_ = !error.out_of_space();
    throw;
  }
  filled_ += zeros.size();
}

void Journal::sync() {
  if (poisoned_) throw PoisonedError("the journal failed earlier: open the store anew");
  if (queue_.empty()) return;
  if (options_.mutant != Mutant::shared_sector) queue_.back().flags |= record_last_of_group;
  std::vector<std::byte> group;
  JournalLink end = end_;
  for (const Record& record : queue_) {
    end.crc = encode_record(group, record, header_, end.crc, end_.lsn);
    end.lsn = record.lsn;
  }
  end.name = header_.name;
  reserve(0);
  queue_.clear();
  queue_bytes_ = 0;
  try {
    write_both(offset_, group);
    if (options_.mutant != Mutant::ack_before_sync) sync_both();
  } catch (const IoError&) {
    // Whether the group is on disk is unknown from here on; only a new open can find out.
    poisoned_ = true;
    throw;
  }
  end_ = end;
  offset_ += group.size();
  if (options_.mutant != Mutant::shared_sector) offset_ = round_up(offset_, sector);
}

void Journal::drop_newest() {
  queue_bytes_ -= record_size(queue_.back().payload.size());
  queue_.pop_back();
  --next_lsn_;
}

void Journal::write_both(uint64_t offset, Bytes data) {
  main_->write(offset, data);
  if (options_.mutant != Mutant::one_commit_copy) mirror_->write(offset, data);
}

void Journal::sync_both() {
  main_->sync();
  if (options_.mutant != Mutant::no_mirror_sync) mirror_->sync();
}

}  // namespace tierload
