// How records change the catalog, forth and back.
#include "tierload/state.h"

#include "tierload/bytes.h"

namespace tierload {
namespace {

// What entries take in a SNAPSHOT, without padding.
uint64_t entry_bytes(const Commit& commit) { return 24 + commit.payload.size(); }
uint64_t value_bytes(const std::string& key, const std::string& value) { return 8 + key.size() + value.size(); }
uint64_t tag_bytes(const std::string& name) { return 16 + name.size(); }

std::string at_lsn(const Record& record) { return "record " + std::to_string(record.lsn); }

[[noreturn]] void unknown_type(const Record& record) {
  throw UnsupportedError(at_lsn(record) + " has type " + std::to_string(static_cast<int>(record.type)) +
                         ", which this release does not know: use a newer tierload");
}

}  // namespace

CommitPtr CatalogState::head() const { return head_ == 0 ? nullptr : find(head_); }

CommitPtr CatalogState::find(uint64_t txid) const {
  const auto found = commits_.find(txid);
  return found == commits_.end() ? nullptr : found->second;
}

void CatalogState::set_value(const std::string& key, const std::optional<std::string>& expected,
                             const std::optional<std::string>& value) {
  const auto found = values_.find(key);
  const bool fits = expected ? found != values_.end() && found->second == *expected : found == values_.end();
  if (!fits) throw CorruptError("recorded value of '" + key + "' is not what the journal says it was");
  if (expected) bytes_ -= value_bytes(key, *expected);
  if (value) bytes_ += value_bytes(key, *value);
  if (value) {
    values_[key] = *value;
  } else if (found != values_.end()) {
    values_.erase(found);
  }
}

void CatalogState::set_tag(const std::string& name, uint64_t expected, uint64_t txid) {
  const auto found = tags_.find(name);
  if ((found == tags_.end() ? 0 : found->second) != expected) {
    throw CorruptError("tag '" + name + "' is not where the journal says it was");
  }
  if (txid == 0) {
    bytes_ -= tags_.erase(name) * tag_bytes(name);
  } else {
    if (!find(txid)) throw CorruptError("tag '" + name + "' names a commit that does not exist");
    if (tags_.insert_or_assign(name, txid).second) bytes_ += tag_bytes(name);
  }
}

void CatalogState::apply(const Record& record) {
  switch (record.type) {
    case RecordType::commit: {
      const CommitPtr commit = decode_commit(record.payload, record.lsn, record.time);
      const CommitPtr before = head();
      if (commit->txid < next_txid_ || commit->previous != (before ? before->id : Digest{})) {
        throw CorruptError(at_lsn(record) + ": COMMIT does not follow the commit before it");
      }
      for (const Change& change : commit->changes) set_value(change.key, change.before, change.after);
      commits_[commit->txid] = commit;
      bytes_ += entry_bytes(*commit);
      head_ = commit->txid;
      next_txid_ = commit->txid + 1;
      return;
    }
    case RecordType::change: {
      const Change change = decode_change(record.payload);
      return set_value(change.key, change.before, change.after);
    }
    case RecordType::tag: {
      const TagChange tag = decode_tag(record.payload);
      return set_tag(tag.name, tag.before, tag.after);
    }
    case RecordType::collect:
      for (const CommitPtr& commit : decode_collect(record.payload)) {
        if (commit->txid == head_ || commits_.erase(commit->txid) == 0) {
          throw CorruptError(at_lsn(record) + ": COLLECT drops a commit that is the head or does not exist");
        }
        bytes_ -= entry_bytes(*commit);
      }
      return;
    case RecordType::snapshot:
      if (CatalogState::decode(record.payload).encode() != encode()) {
        throw CorruptError(at_lsn(record) + ": SNAPSHOT differs from the state that was replayed");
      }
      return;
    case RecordType::prepare:
    case RecordType::heat:
    default:
      if (record.flags & record_skippable) return;
      unknown_type(record);
  }
}

void CatalogState::undo(const Record& record) {
  switch (record.type) {
    case RecordType::commit: {
      const CommitPtr commit = decode_commit(record.payload, record.lsn, record.time);
      if (commit->txid != head_) throw CorruptError(at_lsn(record) + ": COMMIT is not the head that it should be");
      for (auto change = commit->changes.rbegin(); change != commit->changes.rend(); ++change) {
        set_value(change->key, change->after, change->before);
      }
      commits_.erase(commit->txid);
      bytes_ -= entry_bytes(*commit);
      // The commit before is the newest that is left: commits are only dropped by COLLECT, which is undone first.
      head_ = commits_.empty() ? 0 : commits_.rbegin()->first;
      next_txid_ = head_ + 1;
      const CommitPtr before = head();
      if (commit->previous != (before ? before->id : Digest{})) {
        throw CorruptError(at_lsn(record) + ": COMMIT does not follow the commit before it");
      }
      return;
    }
    case RecordType::change: {
      const Change change = decode_change(record.payload);
      return set_value(change.key, change.after, change.before);
    }
    case RecordType::tag: {
      const TagChange tag = decode_tag(record.payload);
      return set_tag(tag.name, tag.after, tag.before);
    }
    case RecordType::collect:
      for (const CommitPtr& commit : decode_collect(record.payload)) {
        if (!commits_.emplace(commit->txid, commit).second) {
          throw CorruptError(at_lsn(record) + ": COLLECT dropped a commit that is still there");
        }
        bytes_ += entry_bytes(*commit);
      }
      return;
    case RecordType::snapshot:
      return apply(record);  // a snapshot changes nothing; it must agree
    case RecordType::prepare:
    case RecordType::heat:
    default:
      if (record.flags & record_skippable) return;
      unknown_type(record);
  }
}

}  // namespace tierload
