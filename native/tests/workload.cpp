#include "tests/workload.h"

#include <algorithm>
#include <cstring>

#include "tierload/bytes.h"
#include "tierload/engine.h"

namespace tierload {
namespace {

// Page `content`: its number, then bytes that follow from it; 1 to 3 sectors of 4 KiB.
std::vector<std::byte> page_bytes(uint64_t content) {
  std::mt19937_64 random(content);
  std::vector<uint64_t> words(64 + random() % 1200);
  words[0] = content;
  for (size_t i = 1; i < words.size(); ++i) words[i] = random();
  const Bytes bytes = std::as_bytes(std::span(words));
  return {bytes.begin(), bytes.end()};
}

const Digest& page_digest(uint64_t content) {
  thread_local std::map<uint64_t, Digest> known;
  const auto [at, added] = known.try_emplace(content);
  if (added) at->second = tree_digest(page_bytes(content), page_leaf);
  return at->second;
}

uint64_t number_of(const Commit& commit) { return std::stoull(commit.meta.substr(commit.meta.find(':') + 1)); }
std::string meta_of(uint64_t number) { return "{\"number\":" + std::to_string(number) + "}"; }

}  // namespace

std::string Model::text() const {
  std::string out = "head " + std::to_string(head) + ", commits";
  for (const auto& [number, pages] : commits) {
    out += " " + std::to_string(number) + "(";
    for (const uint64_t page : pages) out += std::to_string(page) + " ";
    out += ")";
  }
  for (const auto& [name, number] : tags) out += ", " + name + "=" + std::to_string(number);
  for (const auto& [key, value] : values) out += ", " + key + ":" + value;
  return out;
}

Model read_model(Catalog& catalog) {
  Model model;
  const CatalogState& state = catalog.state();
  for (const auto& [txid, commit] : state.commits()) {
    const auto manifest = Manifest::open(catalog.storage(), commit->root.at(0), nullptr);
    std::vector<uint64_t> contents(manifest->pages().size());
    std::vector<PagePart> parts;
    for (uint32_t i = 0; i < contents.size(); ++i) {
      parts.push_back({i, 0, std::as_writable_bytes(std::span(&contents[i], 1))});
    }
    std::vector<uint8_t> touched(parts.size());
    read_pages(catalog.storage(), *manifest, parts, 0, touched, nullptr);
    for (size_t i = 0; i < contents.size(); ++i) {
      if (manifest->pages()[i].raw_digest != page_digest(contents[i]))
        throw CorruptError("a verified page has wrong bytes");
    }
    model.commits[number_of(*commit)] = contents;
    if (txid == state.head()->txid) model.head = number_of(*commit);
  }
  for (const auto& [name, txid] : state.tags()) model.tags[name] = number_of(*state.find(txid));
  model.values = state.values();
  return model;
}

void Coverage::add(const Coverage& other) {
  saves += other.saves;
  dedups += other.dedups;
  aborts += other.aborts;
  records += other.records;
  tags += other.tags;
  rollbacks += other.rollbacks;
  collections += other.collections;
  reopens += other.reopens;
  rolls += other.rolls;
  freed += other.freed;
}

CatalogOptions workload_options(uint64_t seed, Mutant mutant) {
  CatalogOptions options;
  options.journal_roll_bytes = 40 * 1024;
  options.journal_fill_bytes = 12 * 1024;
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

std::unique_ptr<Catalog> Workload::open() {
  return Catalog::open_for_writing(storage_, workload_options(random_(), mutant_));
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
  switch (pick(16)) {
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

}  // namespace tierload
