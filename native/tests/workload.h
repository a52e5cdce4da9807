// Seeded workloads on the shipped catalog and engine, and the model that says what must be there afterwards.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/model.h"
#include "tests/ranks_in_flight.h"
#include "tierload/engine.h"

namespace tierload {

struct Coverage {
  uint64_t saves = 0, dedups = 0, aborts = 0, records = 0, tags = 0, rollbacks = 0, collections = 0, reopens = 0,
           takeovers = 0, rolls = 0, freed = 0;
  // With a save in flight; records, tags, collections and rolls are among those above as well.
  uint64_t saves_in_flight = 0, aborts_in_flight = 0, records_beside = 0, tags_beside = 0, collections_beside = 0,
           freed_beside = 0, rolls_beside = 0, parents_dropped = 0, fenced_in_flight = 0;
  // By several ranks.
  uint64_t saves_by_ranks = 0, ranks_unchanged = 0, aborts_by_ranks = 0, ranks_died = 0, rows_refused = 0,
           ranks_fenced = 0;
  void add(const Coverage& other);
};

class Workload {
 public:
  Workload(std::shared_ptr<Storage> storage, uint64_t seed, Mutant mutant);
  ~Workload();

  // Called around every operation: `models().back()` is what it leads to.
  std::function<void()> on_begin = [] {};
  std::function<void(bool durable)> on_acknowledged = [](bool) {};

  // Opens the store (the first operation) and makes `operations` more.
  void run(unsigned operations);
  const std::vector<Model>& models() const { return models_; }
  const Coverage& coverage() const { return coverage_; }

 private:
  void step();
  void save(bool abort);
  void save_in_flight();
  void save_by_ranks();
  // Every rank's steps, in any order between them. Returns false when a rank died meanwhile.
  bool write_by_ranks(RanksInFlight& saving, const RankContents& contents, const std::vector<bool>& unchanged);
  // A commit that must be refused, of a save that is given up then.
  void refuse(std::optional<RanksInFlight>& saving, const std::vector<RootRow>& rows);
  void give_up(std::optional<RanksInFlight>& saving);
  // An operation beside the save in flight, or none.
  void beside();
  void record(bool sync);
  void tag();
  void rollback();
  void collect();
  void reopen();
  void take_over();
  template <typename Body>
  void operation(Model after, bool durable, Body body);
  std::unique_ptr<Catalog> open(bool take_over = false);
  uint64_t pick(uint64_t below) { return random_() % below; }
  // What a save that follows commit `number` (0: none) holds: some of its pages, and new ones.
  std::vector<uint64_t> contents_like(uint64_t number);
  void count(const WriteResult& written);
  uint64_t txid_of(uint64_t number) const;
  // Any commit, often the oldest: a collection may drop it while it is a parent. Null when there is none.
  CommitPtr any_commit();

  std::shared_ptr<Storage> storage_;
  std::mt19937_64 random_;
  const Mutant mutant_;
  std::unique_ptr<Catalog> catalog_;
  std::vector<std::unique_ptr<RankWriter>> stopped_;  // ranks that were killed: what they wrote stays
  std::vector<Model> models_;
  Coverage coverage_;
  uint64_t next_number_ = 1;
  uint64_t next_content_ = 1;
  bool unsynced_ = false;
};

// Options that make every run of a workload write the same bytes, with journals that roll early.
CatalogOptions workload_options(uint64_t seed, Mutant mutant);

}  // namespace tierload
