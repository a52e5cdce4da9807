#include "tests/workload.h"

#include <algorithm>
#include <cstring>

#include "tierload/bytes.h"
#include "tierload/engine.h"

namespace tierload {

void Coverage::add(const Coverage& other) {
  saves += other.saves;
  dedups += other.dedups;
  aborts += other.aborts;
  records += other.records;
  tags += other.tags;
  rollbacks += other.rollbacks;
  collections += other.collections;
  reopens += other.reopens;
  takeovers += other.takeovers;
  rolls += other.rolls;
  freed += other.freed;
}

CatalogOptions workload_options(uint64_t seed, Mutant mutant) {
  CatalogOptions options;
  options.journal_roll_bytes = 28 * 1024;
  options.journal_fill_bytes = 8 * 1024;
  options.holder = "workload";
  options.now = [clock = uint64_t{0}]() mutable { return ++clock; };
  options.randomize = [random = std::mt19937_64(seed)](MutableBytes bytes) mutable {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  };
  options.mutant = mutant;
  return options;
}

Workload::Workload(std::shared_ptr<Storage> storage, uint64_t seed, Mutant mutant)
    : storage_(std::move(storage)), random_(seed), mutant_(mutant), models_(1) {}

Workload::~Workload() = default;

std::unique_ptr<Catalog> Workload::open(bool take_over) {
  auto options = workload_options(random_(), mutant_);
  options.take_over = take_over;
  return Catalog::open_for_writing(storage_, std::move(options));
}

template <typename Body>
void Workload::operation(Model after, bool durable, Body body) {
  models_.push_back(std::move(after));
  on_begin();
  const uint64_t seq = catalog_ ? catalog_->journal_seq() : 0;
  body();
  if (catalog_ && catalog_->journal_seq() > seq) ++coverage_.rolls;
  unsynced_ = !durable;
  on_acknowledged(durable);
}

void Workload::run(unsigned operations) {
  operation({}, true, [&] { catalog_ = open(); });
  for (unsigned i = 0; i < operations; ++i) step();
}

void Workload::step() {
  switch (pick(17)) {
    case 0:
    case 1:
      return record(false);
    case 2:
    case 3:
      return record(true);
    case 4:
      return save(true);
    case 5:
      return tag();
    case 6:
    case 7:
      return rollback();
    case 8:
    case 9:
      return collect();
    case 10:
      return reopen();
    case 11:
      return take_over();
    default:
      return save(false);
  }
}

void Workload::save(bool abort) {
  const CommitPtr head = catalog_->state().head();
  std::vector<uint64_t> contents = head ? models_.back().commits.at(number_of(*head)) : std::vector<uint64_t>{};
  contents.resize(1 + pick(3));
  for (uint64_t& content : contents) {
    if (content == 0 || pick(2) == 0) content = next_content_++;
  }
  Model after = models_.back();
  const uint64_t number = next_number_++;
  if (!abort) {
    after.commits[number] = contents;
    after.head = number;
  }
  operation(after, !abort || !unsynced_, [&] {
    const auto transaction = catalog_->begin();
    std::vector<std::vector<std::byte>> pages;
    for (const uint64_t content : contents) pages.push_back(page_bytes(content));
    std::vector<SourcePart> raw;
    for (const auto& bytes : pages) raw.push_back({bytes.data(), bytes.size()});
    std::vector<PageSource> sources;
    for (const SourcePart& part : raw) sources.push_back({std::span(&part, 1), 4, false, false});
    std::unique_ptr<Manifest> parent;
    if (head) parent = Manifest::open(*storage_, head->root.at(0), nullptr);
    WriteOptions options;
    options.compression = Compression::off;
    options.segment_bytes = 16 * 1024;
    const WriteResult result = write_pages(*transaction, sources, parent.get(), options, nullptr);
    if (abort) {
      ++coverage_.aborts;
      return;
    }
    ++coverage_.saves;
    coverage_.dedups += result.pages.size() - result.written_pages;
    ManifestParts parts;
    parts.page_bytes = 16 * 1024;
    parts.segments = result.segments;
    parts.pages = result.pages;
    const std::vector<int64_t> dims{static_cast<int64_t>(result.raw_bytes), 0, static_cast<int64_t>(result.raw_bytes)};
    ChunkRow chunk{};
    chunk.key_hash = xxh3(as_bytes("w"));
    chunk.key_length = 1;
    chunk.dtype = 2;
    chunk.ndim = 1;
    chunk.bytes = result.raw_bytes;
    chunk.pages = static_cast<uint32_t>(result.pages.size());
    parts.chunks = std::span(&chunk, 1);
    parts.dims = dims;
    parts.keys = as_bytes("w");
    parts.state = as_bytes("{}");
    Commit draft;
    draft.step = static_cast<int64_t>(number);
    draft.raw_bytes = result.raw_bytes;
    draft.written_bytes = result.written_bytes;
    draft.root = {transaction->write_manifest(parts)};
    draft.meta = meta_of(number);
    transaction->commit(std::move(draft));
  });
}

void Workload::record(bool sync) {
  Model after = models_.back();
  const std::string key(1, static_cast<char>('a' + pick(3)));
  const std::string value(1 + pick(40), static_cast<char>('0' + pick(10)));
  after.values[key] = value;
  operation(after, sync, [&] {
    catalog_->change(key, value, sync);
    ++coverage_.records;
  });
}

uint64_t Workload::txid_of(uint64_t number) const {
  for (const auto& [txid, commit] : catalog_->state().commits()) {
    if (number_of(*commit) == number) return txid;
  }
  return 0;
}

void Workload::tag() {
  Model after = models_.back();
  const std::string name(1, static_cast<char>('A' + pick(2)));
  if (after.tags.contains(name) && pick(2) == 0) {
    after.tags.erase(name);
    return operation(after, true, [&] {
      catalog_->tag(name, 0);
      ++coverage_.tags;
    });
  }
  if (after.commits.empty()) return;
  auto commit = after.commits.begin();
  std::advance(commit, static_cast<ptrdiff_t>(pick(after.commits.size())));
  after.tags[name] = commit->first;
  operation(after, true, [&] {
    catalog_->tag(name, txid_of(commit->first));
    ++coverage_.tags;
  });
}

void Workload::rollback() {
  const auto& commits = catalog_->state().commits();
  if (commits.empty()) return;
  auto target = commits.begin();
  std::advance(target, static_cast<ptrdiff_t>(pick(commits.size())));
  // The model of a past LSN is not kept here, so the values that come back are asked of the engine beforehand; that
  // they are the right ones is what the replay test shows.
  const CatalogState then = catalog_->state_at(target->second->lsn);
  Model after = models_.back();
  const uint64_t number = next_number_++;
  after.commits[number] = after.commits.at(number_of(*target->second));
  after.head = number;
  after.values = then.values();
  operation(after, true, [&] {
    catalog_->rollback(catalog_->state_at(target->second->lsn), meta_of(number));
    ++coverage_.rollbacks;
  });
}

void Workload::collect() {
  Model after = models_.back();
  const CatalogState& state = catalog_->state();
  std::vector<uint64_t> drop;
  for (const auto& [txid, commit] : state.commits()) {
    const bool tagged =
        std::any_of(state.tags().begin(), state.tags().end(), [&](auto& t) { return t.second == txid; });
    // Oldest first, so that what a rollback left behind is dropped before (or with) the rollback.
    if (commit == state.head() || tagged || drop.size() + 2 >= state.commits().size()) break;
    drop.push_back(txid);
  }
  for (const uint64_t txid : drop) after.commits.erase(number_of(*state.find(txid)));
  operation(after, true, [&] {
    const CollectResult result = catalog_->collect(drop);
    ++coverage_.collections;
    coverage_.freed += result.freed_bytes > 0 ? 1 : 0;
  });
}

void Workload::reopen() {
  if (unsynced_) record(true);
  operation(models_.back(), true, [&] {
    catalog_ = nullptr;
    catalog_ = open();
    ++coverage_.reopens;
  });
}

// A second writer takes over from one that was only frozen, and that goes on: what it does from then on does not count.
void Workload::take_over() {
  if (unsynced_) record(true);
  const auto frozen = std::move(catalog_);
  operation(models_.back(), true, [&] { catalog_ = open(true); });
  ++coverage_.takeovers;
  try {
    const CommitPtr head = frozen->state().head();
    switch (pick(head ? 3 : 2)) {
      case 0:
        frozen->change("a", "of a fenced writer", true);
        break;
      case 1:
        frozen->collect({});
        break;
      default:
        frozen->rollback(frozen->state_at(head->lsn), meta_of(next_number_++));
    }
  } catch (const FencedError&) {
    return;
  }
  throw CorruptError("a writer that was taken over from still acknowledges");
}

}  // namespace tierload
