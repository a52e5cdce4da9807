// The write-ahead log: records and bytes, no meaning. docs/FORMAT.md section 5.
//
// A journal is a file `c` and its mirror `m` with equal bytes. It starts with a snapshot, so it is complete by
// itself; a new one is made by every open for writing, so nobody ever appends after a torn tail.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tierload/storage.h"
#include "tierload/testing.h"

namespace tierload {

using StoreId = std::array<std::byte, 16>;

constexpr uint32_t format_version = 1;

// Incompatible features (docs/FORMAT.md section 12): a store that has one is refused by a release that does not know
// it.
constexpr uint64_t feature_ranks = 1;  // commits by several ranks
constexpr uint64_t features_known = feature_ranks;

enum class RecordType : uint8_t { snapshot = 1, commit = 2, change = 3, tag = 4, collect = 5, prepare = 6, heat = 7 };

struct Record {
  RecordType type;
  uint8_t flags = 0;
  uint64_t lsn = 0;
  uint64_t txid = 0;
  uint64_t time = 0;  // nanoseconds since 1970
  std::vector<std::byte> payload;
};

constexpr uint8_t record_last_of_group = 1;
constexpr uint8_t record_skippable = 0x80;
constexpr uint64_t record_payload_max = 64u << 20;

// A journal's place in the order of journals.
struct JournalName {
  uint64_t epoch = 0;
  uint64_t seq = 0;
  auto operator<=>(const JournalName&) const = default;
  std::string path(char copy) const;  // copy: 'c' or 'm'
};

// Where a journal continues from: the last record that counts there.
struct JournalLink {
  JournalName name;
  uint64_t lsn = 0;
  uint32_t crc = 0;
  bool operator==(const JournalLink&) const = default;
};

struct JournalHeader {
  StoreId store_id{};
  JournalName name;
  uint64_t salt = 0;
  uint64_t first_lsn = 1;
  JournalLink predecessor;
  uint64_t features = 0;  // incompatible ones
};

// Journals that have at least one copy, oldest first.
std::vector<JournalName> list_journals(Storage& storage);

// What one copy (0: `c`, 1: `m`) lacks and the other has: the header, or a record and what pads it.
struct JournalGap {
  size_t copy;
  uint64_t offset;
  uint64_t length;
};

struct JournalScan {
  JournalHeader header;
  std::vector<Record> records;        // the first one is the SNAPSHOT
  JournalLink end;                    // the last valid record
  uint64_t end_offset = 0;            // behind it
  std::vector<JournalGap> gaps;       // of what counts, up to `end`
  std::string damage;                 // not empty: acknowledged records after `end` are lost
  std::vector<std::string> warnings;  // what one copy had to give because the other was damaged
};

// Reads both copies of a journal; nothing when neither has a valid header and SNAPSHOT (an interrupted open). When the
// SNAPSHOT is lost but later records show that it had been acknowledged, there are no records, and `damage` says so.
// Throws UnsupportedError for a newer format and CorruptError when the store id differs. `expected` may be null.
// Differences between the copies are warned of below `compared` bytes.
std::optional<JournalScan> scan_journal(Storage& storage, JournalName name, const StoreId* expected,
                                        uint64_t compared = UINT64_MAX);

// Gives each copy what only the other one has, and makes both durable.
void complete_journal(Storage& storage, const JournalScan& scan);

// Makes both copies durable as they are, so that what a reader shows cannot be lost by a power cut.
void sync_journal(Storage& storage, JournalName name);

// The open journal of a writer. Appended records wait in memory until sync(); a failure poisons the object and
// every later call throws PoisonedError.
class Journal {
 public:
  struct Options {
    uint64_t fill_bytes = 64 * 1024;  // zeros that are kept ahead of the end
    Mutant mutant = Mutant::none;
  };

  // Creates both files with header and SNAPSHOT and makes their bytes durable; the caller syncs `wal/`.
  Journal(Storage& storage, const JournalHeader& header, Bytes snapshot, uint64_t time, const Options& options);

  // Queues a record and returns its LSN.
  uint64_t append(RecordType type, uint64_t txid, uint64_t time, Bytes payload);
  // Makes all queued records durable as one sync group in both copies. When there is no room, IoError leaves the
  // queue as it was; any other failure poisons.
  void sync();
  // Takes the newest queued record back.
  void drop_newest();
  // Makes room for what is queued and `bytes` more, so that a later sync() needs no new space. A full disk is IoError,
  // not poison.
  void reserve(uint64_t bytes);

  uint64_t bytes() const { return offset_; }
  JournalLink end() const { return end_; }
  const JournalHeader& header() const { return header_; }
  bool poisoned() const { return poisoned_; }

 private:
  void write_both(uint64_t offset, Bytes data);
  void sync_both();

  JournalHeader header_;
  Options options_;
  std::unique_ptr<File> main_;
  std::unique_ptr<File> mirror_;
  std::vector<Record> queue_;
  uint64_t queue_bytes_ = 0;  // as they will be written
  JournalLink end_;           // the last durable record
  uint64_t next_lsn_;
  uint64_t offset_ = 0;  // where the next group starts
  uint64_t filled_ = 0;  // size of the files
  bool poisoned_ = false;
};

}  // namespace tierload
