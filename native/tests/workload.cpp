#include "tests/workload.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <optional>

#include "tests/in_flight.h"

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
  saves_in_flight += other.saves_in_flight;
  aborts_in_flight += other.aborts_in_flight;
  records_beside += other.records_beside;
  tags_beside += other.tags_beside;
  collections_beside += other.collections_beside;
  freed_beside += other.freed_beside;
  rolls_beside += other.rolls_beside;
  parents_dropped += other.parents_dropped;
  fenced_in_flight += other.fenced_in_flight;
  saves_by_ranks += other.saves_by_ranks;
  ranks_unchanged += other.ranks_unchanged;
  aborts_by_ranks += other.aborts_by_ranks;
  ranks_died += other.ranks_died;
  rows_refused += other.rows_refused;
  ranks_fenced += other.ranks_fenced;
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
  switch (pick(26)) {
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
    case 12:
    case 13:
    case 14:
    case 15:
      return save_in_flight();
    case 16:
    case 17:
    case 18:
    case 19:
    case 20:
      return save_by_ranks();
    default:
      return save(false);
  }
}

std::vector<uint64_t> Workload::contents_like(uint64_t number) {
  std::vector<uint64_t> contents = number == 0 ? std::vector<uint64_t>{} : models_.back().commits.at(number);
  std::erase(contents, 0);  // whichever rank has them
  contents.resize(1 + pick(3));
  for (uint64_t& content : contents) {
    if (content == 0 || pick(2) == 0) content = next_content_++;
  }
  return contents;
}

void Workload::count(const WriteResult& written) {
  ++coverage_.saves;
  coverage_.dedups += written.pages.size() - written.written_pages;
}

void Workload::save(bool abort) {
  const CommitPtr head = catalog_->state().head();
  const std::vector<uint64_t> contents = contents_like(head ? number_of(*head) : 0);
  Model after = models_.back();
  const uint64_t number = next_number_++;
  if (!abort) {
    after.commits[number] = contents;
    after.head = number;
  }
  operation(after, !abort || !unsynced_, [&] {
    InFlight saving(*catalog_, head ? head->txid : 0);
    saving.write_pages(contents);
    if (abort) {
      ++coverage_.aborts;
      return;
    }
    saving.write_manifest();
    saving.commit(number);
    count(saving.written());
  });
}

// A save that takes so long that other operations come in between, each acknowledged by itself. Nothing of it may show
// before its commit begins. Its parent is any commit, often the oldest: a collection may drop it meanwhile.
void Workload::save_in_flight() {
  const CommitPtr parent = any_commit();
  const std::vector<uint64_t> contents = contents_like(parent ? number_of(*parent) : 0);
  const uint64_t number = next_number_++;
  const uint64_t aborted_after = pick(12);  // steps; there are 4
  std::optional<InFlight> saving(std::in_place, *catalog_, parent ? parent->txid : 0);
  const std::array<std::function<void()>, 4> steps{[&] { saving->write_pages(contents); },
                                                   [&] {
                                                     if (pick(2) == 0) saving->flush();
                                                   },
                                                   [&] { saving->write_manifest(); },
                                                   [&] {
                                                     if (pick(4) > 0) saving->flush();
                                                   }};
  for (size_t i = 0; i < steps.size(); ++i) {
    beside();
    steps[i]();
    if (i != aborted_after) continue;
    beside();
    operation(models_.back(), !unsynced_, [&] {
      saving.reset();
      ++coverage_.aborts_in_flight;
    });
    return;
  }
  beside();
  Model after = models_.back();
  after.commits[number] = contents;
  after.head = number;
  std::vector<std::string> tags;
  if (pick(3) == 0) {
    tags = {"A"};
    models_.push_back(after);  // of a torn group COMMIT may be there without its tag
    after.tags["A"] = number;
  }
  operation(after, true, [&] {
    saving->commit(number, tags);
    count(saving->written());
    ++coverage_.saves_in_flight;
  });
}

CommitPtr Workload::any_commit() {
  const auto& commits = catalog_->state().commits();
  if (commits.empty()) return nullptr;
  const uint64_t place = pick(2) == 0 ? 0 : pick(commits.size());
  return std::next(commits.begin(), static_cast<ptrdiff_t>(place))->second;
}

// Two or three ranks make one commit, or none: all of them or nobody. What is handed to rank 0 may be one answer short,
// or one of an earlier attempt.
void Workload::save_by_ranks() {
  const CommitPtr parent = any_commit();
  // Shards of as many ranks can stay as they are.
  const bool as_many = parent && parent->ranks > 1 && pick(4) > 0;
  const uint32_t ranks = as_many ? parent->ranks : static_cast<uint32_t>(2 + pick(2));
  const RankContents before =
      parent && parent->ranks == ranks ? split(models_.back().commits.at(number_of(*parent))) : RankContents{};
  RankContents contents;
  std::vector<bool> unchanged;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    unchanged.push_back(!before.empty() && pick(2) == 0);
    contents.push_back(unchanged[rank] ? before[rank] : contents_like(parent ? number_of(*parent) : 0));
  }
  const uint64_t number = next_number_++;
  const uint64_t fate = pick(10);
  std::unique_ptr<RankWriter> late;  // of an attempt before this one
  if (fate == 0) {
    std::optional<RanksInFlight> earlier(std::in_place, *catalog_, storage_, 0, ranks);
    earlier->write_pages(1, contents_like(0));
    earlier->write_manifest(1);
    late = earlier->part_with(1);
    give_up(earlier);
  }
  std::optional<RanksInFlight> saving(std::in_place, *catalog_, storage_, parent ? parent->txid : 0, ranks);
  if (fate == 1 || fate == 2) {  // a rank dies at some call, in the middle of a write when it is one
    saving->storage_of(1 + static_cast<uint32_t>(pick(ranks - 1)))
        .arm({1 + pick(16), Fault::Kind::partial, EIO, UINT64_MAX / 2, ""});
  }
  if (!write_by_ranks(*saving, contents, unchanged)) return give_up(saving);
  beside();
  std::vector<RootRow> rows = saving->rows();
  if (fate == 0) {
    late->prepare();
    rows[1] = late->row();
    return refuse(saving, rows);
  }
  if (fate == 3) {
    rows.pop_back();
    return refuse(saving, rows);
  }
  if (fate == 4) return give_up(saving);
  Model after = models_.back();
  after.commits[number] = joined(contents);
  after.head = number;
  operation(after, true, [&] {
    saving->commit(number, rows);
    ++coverage_.saves_by_ranks;
    coverage_.ranks_unchanged += static_cast<uint64_t>(std::count(unchanged.begin(), unchanged.end(), true));
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      coverage_.dedups += saving->written(rank).pages.size() - saving->written(rank).written_pages;
    }
  });
}

bool Workload::write_by_ranks(RanksInFlight& saving, const RankContents& contents, const std::vector<bool>& unchanged) {
  std::vector<std::pair<uint32_t, int>> next;  // rank and step
  for (uint32_t rank = 0; rank < contents.size(); ++rank) next.emplace_back(rank, 0);
  while (!next.empty()) {
    if (pick(3) == 0) beside();
    const auto turn = next.begin() + static_cast<ptrdiff_t>(pick(next.size()));
    const auto [rank, step] = *turn;
    try {
      if (step == 0 && !unchanged[rank]) saving.write_pages(rank, contents[rank]);
      if (step == 1 && !unchanged[rank]) saving.write_manifest(rank);
      if (step == 1 && unchanged[rank]) saving.refer(rank);
      if (step == 2) saving.flush(rank);
    } catch (const Error&) {
      if (rank == 0 || !saving.storage_of(rank).hit()) throw;
      ++coverage_.ranks_died;
      stopped_.push_back(saving.part_with(rank));
      return false;
    }
    if (++turn->second == 3) next.erase(turn);
  }
  return true;
}

void Workload::give_up(std::optional<RanksInFlight>& saving) {
  operation(models_.back(), !unsynced_, [&] {
    saving.reset();
    ++coverage_.aborts_by_ranks;
  });
}

void Workload::refuse(std::optional<RanksInFlight>& saving, const std::vector<RootRow>& rows) {
  try {
    saving->commit(next_number_++, rows);
  } catch (const UsageError&) {
    ++coverage_.rows_refused;
    return give_up(saving);
  }
  throw CorruptError("a commit was made with a row that is missing, or of another attempt");
}

void Workload::beside() {
  const Coverage before = coverage_;
  switch (pick(7)) {
    case 0:
      record(false);
      break;
    case 1:
      record(true);
      break;
    case 2:
      tag();
      break;
    case 3:
      collect();
      break;
    default:
      return;
  }
  coverage_.records_beside += coverage_.records - before.records;
  coverage_.tags_beside += coverage_.tags - before.tags;
  coverage_.collections_beside += coverage_.collections - before.collections;
  coverage_.freed_beside += coverage_.freed - before.freed;
  coverage_.rolls_beside += coverage_.rolls - before.rolls;
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
    coverage_.parents_dropped += result.pinned;  // nobody else holds a manifest
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
  const CommitPtr head = frozen->state().head();
  const uint64_t next = pick(head ? 5 : 4);
  std::optional<InFlight> saving;
  if (next == 2) {
    saving.emplace(*frozen, head ? head->txid : 0);
    saving->write_pages(contents_like(head ? number_of(*head) : 0));
  }
  std::optional<RanksInFlight> by_ranks;
  const bool prepared = pick(2) == 0;  // all have handed their rows in, or rank 1 has not
  if (next == 3) {
    by_ranks.emplace(*frozen, storage_, 0, 2);
    for (const uint32_t rank : {0u, 1u}) {
      by_ranks->write_pages(rank, contents_like(0));
      if (prepared) by_ranks->write_manifest(rank);
      if (prepared) by_ranks->flush(rank);
    }
  }
  operation(models_.back(), true, [&] { catalog_ = open(true); });
  ++coverage_.takeovers;
  try {
    switch (next) {
      case 0:
        frozen->change("a", "of a fenced writer", true);
        break;
      case 1:
        frozen->collect({});
        break;
      case 2:
        ++coverage_.fenced_in_flight;
        saving->write_manifest();
        saving->commit(next_number_++);
        break;
      case 3:
        ++coverage_.ranks_fenced;
        if (prepared) {
          by_ranks->commit(next_number_++, by_ranks->rows());
        } else {
          by_ranks->write_manifest(1);
          by_ranks->flush(1);
        }
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
