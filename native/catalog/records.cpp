// Payloads of COMMIT, CHANGE, TAG and COLLECT.
#include "tierload/bytes.h"
#include "tierload/state.h"

namespace tierload {
namespace {

constexpr uint32_t flag_step = 1;
constexpr uint32_t flag_rollback = 2;
constexpr uint32_t absent = 0xFFFFFFFF;
constexpr uint64_t txid_end = uint64_t{1} << 48;  // file names hold 48 bits of a txid and 32 of an epoch
constexpr uint64_t epoch_end = uint64_t{1} << 32;

uint64_t text_digest(const std::optional<std::string>& text) { return text ? xxh3(as_bytes(*text)) : 0; }
uint32_t text_length(const std::optional<std::string>& text) {
  return text ? static_cast<uint32_t>(text->size()) : absent;
}

void put_change(ByteWriter& out, const Change& change) {
  out.put(uint32_t{change.after ? 1u : 2u});
  out.put(static_cast<uint32_t>(change.key.size()));
  out.put(text_length(change.before));
  out.put(text_length(change.after));
  out.put(text_digest(change.before));
  out.put(text_digest(change.after));
  out.put(change.key);
  out.put(change.before.value_or(""));
  out.put(change.after.value_or(""));
  out.pad(8);
}

std::optional<std::string> take_value(ByteReader& in, uint32_t length, uint64_t digest, const std::string& key) {
  if (length == absent) return std::nullopt;
  std::optional<std::string> value = in.text(length);
  if (text_digest(value) != digest) throw CorruptError("recorded value of '" + key + "' has a wrong digest");
  return value;
}

Change take_change(ByteReader& in) {
  in.get<uint32_t>();  // the operation follows from what is absent
  const auto key = in.get<uint32_t>();
  const auto before = in.get<uint32_t>();
  const auto after = in.get<uint32_t>();
  const auto before_digest = in.get<uint64_t>();
  const auto after_digest = in.get<uint64_t>();
  Change change;
  change.key = in.text(key);
  change.before = take_value(in, before, before_digest, change.key);
  change.after = take_value(in, after, after_digest, change.key);
  in.align(8);
  return change;
}

void put_entry(ByteWriter& out, const Commit& commit) {
  out.put(commit.lsn);
  out.put(commit.time);
  out.put(static_cast<uint32_t>(commit.payload.size()));
  out.put(uint32_t{0});
  out.put(Bytes(commit.payload));
  out.pad(8);
}

CommitPtr take_entry(ByteReader& in) {
  const auto lsn = in.get<uint64_t>();
  const auto time = in.get<uint64_t>();
  const auto length = in.get<uint32_t>();
  in.get<uint32_t>();
  CommitPtr commit = decode_commit(in.take(length), lsn, time);
  in.align(8);
  return commit;
}

}  // namespace

std::vector<std::byte> encode_commit(const Commit& commit) {
  ByteWriter out;
  out.put(commit.txid);
  out.put(commit.parent);
  out.put(commit.source);
  out.put(commit.step.value_or(0));
  out.put((commit.step ? flag_step : 0) | (commit.rollback ? flag_rollback : 0));
  out.put(commit.ranks);
  out.put(commit.previous);
  out.put(commit.raw_bytes);
  out.put(commit.written_bytes);
  out.put(static_cast<uint32_t>(commit.meta.size()));
  out.put(static_cast<uint32_t>(commit.changes.size()));
  out.put(commit.root);
  out.put(commit.meta);
  out.pad(8);
  for (const Change& change : commit.changes) put_change(out, change);
  return out.take();
}

CommitPtr decode_commit(Bytes payload, uint64_t lsn, uint64_t time) {
  auto commit = std::make_shared<Commit>();
  ByteReader in(payload, "COMMIT record " + std::to_string(lsn));
  commit->txid = in.get<uint64_t>();
  commit->parent = in.get<uint64_t>();
  commit->source = in.get<uint64_t>();
  const auto step = in.get<int64_t>();
  const auto flags = in.get<uint32_t>();
  commit->ranks = in.get<uint32_t>();
  commit->previous = in.get<Digest>();
  commit->raw_bytes = in.get<uint64_t>();
  commit->written_bytes = in.get<uint64_t>();
  const auto meta = in.get<uint32_t>();
  const auto changes = in.get<uint32_t>();
  if (flags & flag_step) commit->step = step;
  commit->rollback = (flags & flag_rollback) != 0;
  commit->root = in.get<RootRow>();
  commit->meta = in.text(meta);
  in.align(8);
  for (uint32_t i = 0; i < changes; ++i) commit->changes.push_back(take_change(in));
  // A commit continues an older one: nothing that follows these numbers can run in circles or leave the file names.
  const RootRow& root = commit->root;
  bool fits = in.done() && commit->txid > 0 && commit->txid < txid_end && commit->parent < commit->txid &&
              commit->source < commit->txid && commit->rollback == (commit->source != 0);
  fits &= root.rank == 0 && root.epoch < epoch_end && root.txid <= commit->txid;
  fits &= commit->ranks > 0 && commit->ranks <= ranks_max;
  fits &= commit->ranks == 1 || root.body_length == root_body_length(commit->ranks);
  if (!fits) throw CorruptError("COMMIT record " + std::to_string(lsn) + " is malformed");
  commit->id = xxh3_128(payload);
  commit->lsn = lsn;
  commit->time = time;
  commit->payload.assign(payload.begin(), payload.end());
  return commit;
}

std::vector<std::byte> encode_change(const Change& change) {
  ByteWriter out;
  put_change(out, change);
  return out.take();
}

Change decode_change(Bytes payload) {
  ByteReader in(payload, "CHANGE record");
  return take_change(in);
}

std::vector<std::byte> encode_tag(const TagChange& tag) {
  ByteWriter out;
  out.put(tag.before);
  out.put(tag.after);
  out.put(static_cast<uint32_t>(tag.name.size()));
  out.put(uint32_t{0});
  out.put(tag.name);
  return out.take();
}

TagChange decode_tag(Bytes payload) {
  ByteReader in(payload, "TAG record");
  TagChange tag;
  tag.before = in.get<uint64_t>();
  tag.after = in.get<uint64_t>();
  const auto length = in.get<uint32_t>();
  in.get<uint32_t>();
  tag.name = in.text(length);
  if (tag.name.empty()) throw CorruptError("TAG record without a name");
  return tag;
}

std::vector<std::byte> encode_collect(const std::vector<CommitPtr>& dropped) {
  ByteWriter out;
  out.put(static_cast<uint32_t>(dropped.size()));
  out.put(uint32_t{0});
  for (const CommitPtr& commit : dropped) put_entry(out, *commit);
  return out.take();
}

std::vector<CommitPtr> decode_collect(Bytes payload) {
  ByteReader in(payload, "COLLECT record");
  const auto count = in.get<uint32_t>();
  in.get<uint32_t>();
  std::vector<CommitPtr> dropped;
  for (uint32_t i = 0; i < count; ++i) dropped.push_back(take_entry(in));
  return dropped;
}

std::vector<std::byte> CatalogState::encode() const {
  ByteWriter out;
  out.put(next_txid_);
  out.put(head_);
  out.put(static_cast<uint32_t>(commits_.size()));
  out.put(static_cast<uint32_t>(tags_.size()));
  out.put(static_cast<uint32_t>(values_.size()));
  out.put(uint32_t{0});
  for (const auto& [txid, commit] : commits_) put_entry(out, *commit);
  for (const auto& [name, txid] : tags_) {
    out.put(txid);
    out.put(static_cast<uint32_t>(name.size()));
    out.put(uint32_t{0});
    out.put(name);
    out.pad(8);
  }
  for (const auto& [key, value] : values_) {
    out.put(static_cast<uint32_t>(key.size()));
    out.put(static_cast<uint32_t>(value.size()));
    out.put(key);
    out.put(value);
    out.pad(8);
  }
  return out.take();
}

CatalogState CatalogState::decode(Bytes payload) {
  ByteReader in(payload, "SNAPSHOT record");
  CatalogState state;
  state.next_txid_ = in.get<uint64_t>();
  state.head_ = in.get<uint64_t>();
  const auto commits = in.get<uint32_t>();
  const auto tags = in.get<uint32_t>();
  const auto values = in.get<uint32_t>();
  in.get<uint32_t>();
  for (uint32_t i = 0; i < commits; ++i) {
    const CommitPtr commit = take_entry(in);
    state.commits_.emplace_hint(state.commits_.end(), commit->txid, commit);
  }
  for (uint32_t i = 0; i < tags; ++i) {
    const auto txid = in.get<uint64_t>();
    const auto length = in.get<uint32_t>();
    in.get<uint32_t>();
    if (!state.find(txid) || length == 0) throw CorruptError("SNAPSHOT record is malformed");
    state.tags_[in.text(length)] = txid;
    in.align(8);
  }
  for (uint32_t i = 0; i < values; ++i) {
    const auto key_length = in.get<uint32_t>();
    const auto value_length = in.get<uint32_t>();
    std::string key = in.text(key_length);
    state.values_[std::move(key)] = in.text(value_length);
    in.align(8);
  }
  if (state.commits_.size() != commits || state.tags_.size() != tags || state.values_.size() != values ||
      state.head_ != (state.commits_.empty() ? 0 : state.commits_.rbegin()->first) ||
      state.next_txid_ != state.head_ + 1 || !in.done()) {
    throw CorruptError("SNAPSHOT record is malformed");
  }
  state.bytes_ = payload.size();
  return state;
}

}  // namespace tierload
