// tierload_crash: crash enumeration from the command line.
//   tierload_crash run SECONDS WORKLOADS [SEED]   at least so many workloads, then on until the time is up
//   tierload_crash mutants SECONDS [SEED]         every seeded mistake must be found within SECONDS
// Exit code 0: as it should be; 1: a bad state (or a mutant that was not found, or a path that was never taken).
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/crash.h"

namespace {

using namespace tierload;
using Clock = std::chrono::steady_clock;

constexpr unsigned operations = 12;
constexpr double density = 0.25;

constexpr std::pair<Mutant, const char*> mutants[] = {
    {Mutant::no_segment_sync, "segments are not synced before COMMIT"},
    {Mutant::no_manifest_sync, "manifests are not synced before COMMIT"},
    {Mutant::no_directory_sync, "new names are not synced before COMMIT"},
    {Mutant::one_commit_copy, "the journal has no mirror"},
    {Mutant::ack_before_sync, "records are acknowledged before a sync"},
    {Mutant::early_reuse, "pages are freed before COLLECT is durable"},
    {Mutant::no_relog, "a reader shows what it has not synced"},
    {Mutant::shared_sector, "a record shares a sector with an acknowledged one"},
    {Mutant::no_journal_directory_sync, "a journal's name is not synced before SUPER names it"},
    {Mutant::base_before_journal, "SUPER names a journal that is not durable"},
    {Mutant::loose_link, "a new journal names a record that may be lost"},
    {Mutant::no_mirror_sync, "the journal's mirror is not synced"},
    {Mutant::one_manifest_sync, "a manifest's mirror is not synced"},
    {Mutant::no_fence, "a writer does not look whether it was taken over"},
    {Mutant::damage_is_tail, "damaged records pass for a torn tail"},
    {Mutant::in_flight_is_garbage, "a collection removes files of the save in flight"},
    {Mutant::no_shard_sync, "a rank hands its row in before its shard is durable"},
    {Mutant::root_after_commit, "COMMIT is written before the root file is durable"},
    {Mutant::stale_row, "a row of an earlier attempt is accepted"},
    {Mutant::missing_row, "a commit does not wait for every rank's row"},
    {Mutant::flush_once, "what follows a save's first flush is not synced"},
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int run(double seconds, uint64_t workloads, uint64_t seed) {
  const auto start = Clock::now();
  CrashCounts total;
  std::mutex mutex;
  std::atomic<uint64_t> next{0};
  const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> pool;
  for (unsigned i = 0; i < workers; ++i) {
    pool.emplace_back([&] {
      while (true) {
        const uint64_t number = next++;
        if (number >= workloads && seconds_since(start) >= seconds) return;
        const CrashCounts counts = enumerate_crashes(seed + number, operations, density, Mutant::none);
        const std::lock_guard guard(mutex);
        total.add(counts);
      }
    });
  }
  for (std::thread& worker : pool) worker.join();
  const double took = seconds_since(start);
  const double processor = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;  // of all threads
  const auto n = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf("crash enumeration: %llu workloads (seeds %llu..%llu, %u operations each), %.0f s on %u threads\n",
              n(total.workloads), n(seed), n(seed + total.workloads - 1), operations, took, workers);
  std::printf("  distinct images %llu, distinct states %llu (%.0f a second of one processor)\n", n(total.images),
              n(total.states), static_cast<double>(total.states) / processor);
  std::printf(
      "  power cut %llu, cut inside or after recovery %llu, kill then cut %llu, reader then cut %llu, rot %llu\n",
      n(total.power_cuts), n(total.recovery_cuts), n(total.kills), n(total.readers), n(total.rots));
  std::printf(
      "  one copy gone after a cut %llu, a record gone in both %llu, histories %llu, collections %llu,\n"
      "  compared with a reader %llu\n",
      n(total.lost_copies), n(total.lost_pairs), n(total.histories), n(total.collections), n(total.comparisons));
  const Coverage& c = total.coverage;
  std::printf(
      "  saves %llu, pages deduplicated %llu, aborts %llu, records %llu, tags %llu, rollbacks %llu,\n"
      "  collections %llu (%llu freed something), reopens %llu, takeovers %llu, journal rolls %llu\n",
      n(c.saves), n(c.dedups), n(c.aborts), n(c.records), n(c.tags), n(c.rollbacks), n(c.collections), n(c.freed),
      n(c.reopens), n(c.takeovers), n(c.rolls));
  std::printf(
      "  in flight: saves %llu, aborts %llu, fenced off %llu; beside them: records %llu, tags %llu,\n"
      "  collections %llu (%llu freed something), journal rolls %llu, parents dropped %llu\n",
      n(c.saves_in_flight), n(c.aborts_in_flight), n(c.fenced_in_flight), n(c.records_beside), n(c.tags_beside),
      n(c.collections_beside), n(c.freed_beside), n(c.rolls_beside), n(c.parents_dropped));
  std::printf(
      "  by ranks: saves %llu (%llu shards unchanged), aborts %llu, ranks that died %llu, rows refused %llu,\n"
      "  fenced off %llu\n",
      n(c.saves_by_ranks), n(c.ranks_unchanged), n(c.aborts_by_ranks), n(c.ranks_died), n(c.rows_refused),
      n(c.ranks_fenced));
  std::printf("  lost %llu, future %llu, false corruption %llu\n", n(total.lost), n(total.future),
              n(total.false_corruption));
  if (total.bad() > 0) {
    std::printf("  first: %s\n", total.first_failure.c_str());
    return 1;
  }
  for (const uint64_t taken : {c.saves,
                               c.dedups,
                               c.aborts,
                               c.records,
                               c.tags,
                               c.rollbacks,
                               c.collections,
                               c.freed,
                               c.reopens,
                               c.takeovers,
                               c.rolls,
                               total.recovery_cuts,
                               total.kills,
                               total.readers,
                               total.rots,
                               total.lost_copies,
                               total.lost_pairs,
                               total.histories,
                               total.collections,
                               total.comparisons,
                               c.saves_in_flight,
                               c.aborts_in_flight,
                               c.records_beside,
                               c.tags_beside,
                               c.collections_beside,
                               c.freed_beside,
                               c.rolls_beside,
                               c.parents_dropped,
                               c.fenced_in_flight,
                               c.saves_by_ranks,
                               c.ranks_unchanged,
                               c.aborts_by_ranks,
                               c.ranks_died,
                               c.rows_refused,
                               c.ranks_fenced}) {
    if (taken == 0) {
      std::printf("  a path was never taken: the counts above that are zero say which\n");
      return 1;
    }
  }
  return 0;
}

int find_mutants(double seconds, uint64_t first_seed) {
  int missed = 0;
  for (const auto& [mutant, what] : mutants) {
    const auto start = Clock::now();
    CrashCounts total;
    for (uint64_t seed = first_seed; total.bad() == 0 && seconds_since(start) < seconds; ++seed) {
      total.add(enumerate_crashes(seed, operations, density, mutant));
    }
    std::printf(
        "%-55s %s: %.1f s, %llu workloads, %llu states, %llu bad (lost %llu, future %llu, false corruption %llu)\n",
        what, total.bad() > 0 ? "found" : "MISSED", seconds_since(start),
        static_cast<unsigned long long>(total.workloads), static_cast<unsigned long long>(total.states),
        static_cast<unsigned long long>(total.bad()), static_cast<unsigned long long>(total.lost),
        static_cast<unsigned long long>(total.future), static_cast<unsigned long long>(total.false_corruption));
    missed += total.bad() == 0 ? 1 : 0;
  }
  std::printf("%zu mutants, %d missed\n", std::size(mutants), missed);
  return missed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc >= 4 && std::strcmp(argv[1], "run") == 0) {
    return run(std::atof(argv[2]), std::strtoull(argv[3], nullptr, 10),
               argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 1);
  }
  if (argc >= 3 && std::strcmp(argv[1], "mutants") == 0) {
    return find_mutants(std::atof(argv[2]), argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  }
  std::fprintf(stderr, "usage: tierload_crash run SECONDS WORKLOADS [SEED] | mutants SECONDS [SEED]\n");
  return 2;
}
