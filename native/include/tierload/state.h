// What the catalog knows: commits, head, tags and small values, and how records change it, forth and back.
// docs/FORMAT.md sections 5.2 to 5.5. Pure values: no files.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tierload/digest.h"
#include "tierload/journal.h"

namespace tierload {

constexpr uint32_t ranks_max = 65536;  // file names have 16 bits of a rank
constexpr uint64_t root_header_length = 64;

// One row of a commit's root: the manifest shard of one rank. It pins the shard by length and digest, and its `txid` is
// that of the transaction that changed the shard last: the rank's entry in the version vector.
struct RootRow {
  uint32_t rank = 0;
  uint32_t reserved = 0;
  uint64_t epoch = 0;
  uint64_t txid = 0;
  uint64_t body_length = 0;
  Digest digest;
  uint64_t reserved2 = 0;
  uint64_t reserved3 = 0;
  bool operator==(const RootRow&) const = default;
};
static_assert(sizeof(RootRow) == 64);

constexpr uint64_t root_body_length(uint32_t ranks) { return root_header_length + uint64_t{ranks} * sizeof(RootRow); }

// A small value set (or removed) between commits, with what it was before.
struct Change {
  std::string key;
  std::optional<std::string> before;
  std::optional<std::string> after;
};

struct Commit {
  uint64_t txid = 0;
  uint64_t parent = 0;
  uint64_t source = 0;
  std::optional<int64_t> step;
  bool rollback = false;
  Digest previous;
  uint64_t raw_bytes = 0;
  uint64_t written_bytes = 0;
  uint32_t ranks = 1;
  RootRow root;      // of one rank: its shard; of several: the root file (tierload/root.h), and the rank is 0
  std::string meta;  // JSON object
  std::vector<Change> changes;

  // Known once it is in the journal:
  Digest id;
  uint64_t lsn = 0;
  uint64_t time = 0;
  std::vector<std::byte> payload;  // exactly what the journal holds; the id is its digest
};

using CommitPtr = std::shared_ptr<const Commit>;

std::vector<std::byte> encode_commit(const Commit& commit);
CommitPtr decode_commit(Bytes payload, uint64_t lsn, uint64_t time);

std::vector<std::byte> encode_change(const Change& change);
Change decode_change(Bytes payload);

struct TagChange {
  std::string name;
  uint64_t before = 0;
  uint64_t after = 0;
};
std::vector<std::byte> encode_tag(const TagChange& tag);
TagChange decode_tag(Bytes payload);

std::vector<std::byte> encode_collect(const std::vector<CommitPtr>& dropped);
std::vector<CommitPtr> decode_collect(Bytes payload);

class CatalogState {
 public:
  // Both throw CorruptError when the record does not fit the state: a value is not what the record says it was, ...
  void apply(const Record& record);
  void undo(const Record& record);

  std::vector<std::byte> encode() const;  // SNAPSHOT payload; equal states have equal bytes
  static CatalogState decode(Bytes payload);

  // How long encode() would be, within a few bytes.
  uint64_t encoded_bytes() const { return bytes_; }

  uint64_t next_txid() const { return next_txid_; }
  CommitPtr head() const;               // null when there is no commit
  CommitPtr find(uint64_t txid) const;  // null when there is none
  const std::map<uint64_t, CommitPtr>& commits() const { return commits_; }
  const std::map<std::string, uint64_t>& tags() const { return tags_; }
  const std::map<std::string, std::string>& values() const { return values_; }

 private:
  void set_value(const std::string& key, const std::optional<std::string>& expected,
                 const std::optional<std::string>& value);
  void set_tag(const std::string& name, uint64_t expected, uint64_t txid);

  uint64_t next_txid_ = 1;
  uint64_t head_ = 0;
  uint64_t bytes_ = 32;
  std::map<uint64_t, CommitPtr> commits_;
  std::map<std::string, uint64_t> tags_;
  std::map<std::string, std::string> values_;
};

}  // namespace tierload
