#include "tests/crash.h"

#include <algorithm>
#include <unordered_set>

#include "journal/record.h"
#include "tests/power_cut.h"
#include "tests/recovery.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

// The models that a crash may leave: indices [oldest, newest].
struct Allowed {
  size_t oldest = 0;
  size_t newest = 0;
};

// What the workload had promised after so many calls.
struct Promise {
  size_t calls = 0;
  Allowed allowed;
};

void flip_bit(Content& content, uint64_t byte, unsigned bit) {
  std::array<std::byte, 1> value;
  content.read(byte, value);
  value[0] ^= static_cast<std::byte>(1 << bit);
  content.write(byte, value);
}

// Where the sync groups of a journal begin.
std::vector<uint64_t> group_offsets(const JournalScan& scan) {
  std::vector<uint64_t> groups;
  uint64_t offset = sector;
  bool begins = true;
  for (const Record& record : scan.records) {
    if (begins) groups.push_back(offset);
    offset += record_size(record.payload.size());
    begins = record.flags & record_last_of_group;
    if (begins) offset = round_up(offset, sector);
  }
  return groups;
}

class Enumeration {
 public:
  Enumeration(uint64_t seed, double density, Mutant mutant)
      : seed_(seed), random_(seed ^ 0x9E3779B97F4A7C15u), density_(density), mutant_(mutant) {}

  CrashCounts run(unsigned operations) {
    auto disk = std::make_shared<SimulatedStorage>();
    Workload workload(disk, seed_, mutant_);
    Allowed now;
    workload.on_begin = [&] {
      now.newest = workload.models().size() - 1;
      promises_.push_back({disk->calls().size(), now});
    };
    workload.on_acknowledged = [&](bool durable) {
      if (durable) now.oldest = now.newest;
      promises_.push_back({disk->calls().size(), now});
    };
    try {
      workload.run(operations);
    } catch (const Error& error) {
      // Only a seeded mistake brings the engine to refuse its own store without any crash.
      fail(counts_.false_corruption, std::string("the workload itself: ") + error.what(), 0, {});
    }
    models_ = &workload.models();
    counts_.coverage = workload.coverage();
    counts_.workloads = 1;
    cut_power(disk->calls());
    rot(disk->now(), allowed_after(disk->calls().size()));
    counts_.images = images_.size();
    counts_.states = states_.size();
    return counts_;
  }

 private:
  // The calls that were issued by now decide what may be there: an operation may show as soon as it has begun, and must
  // once it was acknowledged.
  Allowed allowed_after(size_t calls) const {
    Allowed allowed = promises_.front().allowed;
    for (const Promise& promise : promises_) {
      if (promise.calls > calls) break;
      allowed.newest = promise.allowed.newest;
      allowed.oldest = promise.allowed.oldest;
    }
    return allowed;
  }

  void cut_power(const std::vector<Call>& calls) {
    PowerCut cut{Image{}};
    std::uniform_real_distribution<double> coin(0, 1);
    for (size_t made = 0; made <= calls.size(); ++made) {
      if (made > 0) cut.advance(calls[made - 1]);
      const Allowed allowed = allowed_after(made);
      cut.visit(2, random_, [&](const Image& image) {
        if (coin(random_) >= density_) return;
        if (!fresh(image, allowed)) return;
        ++counts_.power_cuts;
        auto disk = std::make_shared<SimulatedStorage>(image);
        const Found found = open(disk);
        if (!check(found, allowed, made, "power cut")) return;
        if (random_() % 16 == 0) compare_reader(image, *found.model, allowed, made);
        if (random_() % 16 == 0) {
          cut_again(image, disk->calls(), 0, allowed, *found.model, made, counts_.recovery_cuts, "cut in recovery");
        }
        if (random_() % 4 == 0) lose_copy(image, allowed, made, "power cut");
        if (random_() % 8 == 0) lose_pair(image, allowed, made);
      });
      if (coin(random_) < density_ / 4) kill(cut, allowed, made, false);
      if (coin(random_) < density_ / 4) kill(cut, allowed, made, true);
    }
  }

  // The process dies, the machine lives on; somebody opens the store, and then the power goes.
  void kill(const PowerCut& cut, Allowed allowed, size_t made, bool reader) {
    auto disk = std::make_shared<SimulatedStorage>(cut.durable(), cut.pending());
    const size_t before = disk->calls().size();
    if (reader && disk->list("wal").empty()) return;  // no store yet: nothing to show
    const Found found = reader ? look(disk, options()) : open(disk);
    if (!check(found, allowed, made, reader ? "reader after a kill" : "kill")) return;
    cut_again(cut.durable(), disk->calls(), before, allowed, *found.model, made,
              reader ? counts_.readers : counts_.kills, reader ? "cut after a reader" : "cut after a kill");
  }

  // Power cuts among `calls` (from number `from` on): before the last one anything allowed may be found; after it,
  // nothing older than what was shown.
  void cut_again(const Image& start, const std::vector<Call>& calls, size_t from, Allowed allowed, const Model& shown,
                 size_t made, uint64_t& counter, const char* what) {
    Allowed after = allowed;
    while (after.oldest < after.newest && (*models_)[after.oldest] != shown) ++after.oldest;
    PowerCut cut{start};
    for (size_t i = 0; i <= calls.size(); ++i) {
      if (i > 0) cut.advance(calls[i - 1]);
      if (i < from || (i < calls.size() && random_() % 4 != 0)) continue;
      const Allowed here = i == calls.size() ? after : allowed;
      cut.visit(1, random_, [&](const Image& image) {
        if (i < calls.size() && random_() % 4 != 0) return;
        if (!fresh(image, here)) return;
        ++counter;
        if (!check(open(image), here, made, what)) return;
        // What a reader showed may stand in one copy only, if its writer was killed between the two.
        if (random_() % 4 == 0) lose_copy(image, &counter == &counts_.readers ? allowed : here, made, what);
      });
    }
  }

  // One sector of one metadata file is damaged or a copy is gone: nothing may be lost.
  void rot(const Image& image, Allowed last) {
    for (const auto& [path, inode] : image.names) {
      const bool metadata = path == "SUPER" || path.starts_with("wal/") || path.starts_with("man/");
      if (!metadata) continue;
      const Content& file = image.files.at(inode);
      for (uint64_t at = 0; at < file.size; at += 512) {
        Image rotten = image;
        flip_bit(rotten.files[inode], at + random_() % std::min<uint64_t>(512, file.size - at), random_() % 8);
        if (!fresh(rotten, last)) continue;
        ++counts_.rots;
        check(open(rotten), last, 0, "rot in " + path);
      }
      Image without = image;
      without.names.erase(path);
      ++counts_.rots;
      check(open(without), last, 0, "loss of " + path);
    }
  }

  // After a crash a mirrored file loses one copy, or a sector of it: what was acknowledged stands in the other.
  void lose_copy(const Image& image, Allowed allowed, size_t made, const std::string& what) {
    std::vector<std::pair<std::string, uint32_t>> mirrored;
    for (const auto& name : image.names) {
      if (name.first.starts_with("wal/") || name.first.starts_with("man/")) mirrored.push_back(name);
    }
    if (mirrored.empty()) return;
    const auto& [path, inode] = mirrored[random_() % mirrored.size()];
    Image left = image;
    Content& content = left.files[inode];
    if (content.size == 0 || random_() % 2 == 0) {
      left.names.erase(path);
    } else {
      flip_bit(content, random_() % content.size, random_() % 8);
    }
    if (!fresh(left, allowed)) return;
    ++counts_.lost_copies;
    check(open(left), allowed, made, what + " and loss of " + path);
  }

  // After a crash a record is damaged in both copies, and a later group says that it had been acknowledged: the store
  // may refuse, but not leave it out.
  void lose_pair(const Image& image, Allowed allowed, size_t made) {
    SimulatedStorage disk(image);
    const auto journals = list_journals(disk);
    const auto scan = journals.empty() ? std::nullopt : scan_journal(disk, journals.back(), nullptr);
    const auto groups = scan ? group_offsets(*scan) : std::vector<uint64_t>{};
    if (groups.size() < 2) return;
    const uint64_t byte = groups[random_() % (groups.size() - 1)] + random_() % sizeof(RecordHeader);
    Image left = image;
    for (const char copy : {'c', 'm'}) {
      const auto name = left.names.find(journals.back().path(copy));
      if (name != left.names.end()) flip_bit(left.files[name->second], byte, random_() % 8);
    }
    if (!fresh(left, allowed)) return;
    ++counts_.lost_pairs;
    for (const Found& found : {open(left), look(std::make_shared<SimulatedStorage>(left), options())}) {
      if (found.model) check(found, allowed, made, "damage in both copies of " + journals.back().path('c'));
    }
  }

  // Who only reads finds the same.
  void compare_reader(const Image& image, const Model& expected, Allowed allowed, size_t made) {
    const auto disk = std::make_shared<SimulatedStorage>(image);
    if (disk->list("wal").empty()) return;  // no store yet
    ++counts_.comparisons;
    const Found found = look(disk, options());
    if (check(found, allowed, made, "reader") && *found.model != expected) {
      fail(counts_.future, "a reader finds something else than a writer: " + found.model->text(), made, allowed);
    }
  }

  bool fresh(const Image& image, Allowed allowed) {
    const uint64_t hash = image.hash();
    images_.insert(hash);
    const std::array<uint64_t, 3> state{hash, allowed.oldest, allowed.newest};
    return states_.insert(xxh3(std::as_bytes(std::span(state)))).second;
  }

  CatalogOptions options() { return workload_options(random_(), mutant_); }

  Found open(const Image& image) { return open(std::make_shared<SimulatedStorage>(image)); }
  Found open(const std::shared_ptr<SimulatedStorage>& disk) {
    const bool thorough = random_() % 32 == 0;
    counts_.collections += thorough ? 1 : 0;
    return recover(disk, options(), thorough);
  }

  bool check(const Found& found, Allowed allowed, size_t made, const std::string& what) {
    if (!found.model) {
      fail(counts_.false_corruption, what + ": " + found.error, made, allowed);
      return false;
    }
    counts_.histories += found.model->commits.empty() ? 0 : 1;
    for (size_t i = allowed.oldest; i <= allowed.newest; ++i) {
      if ((*models_)[i] == *found.model) return true;
    }
    const bool older = std::find(models_->begin(), models_->begin() + static_cast<ptrdiff_t>(allowed.oldest),
                                 *found.model) != models_->begin() + static_cast<ptrdiff_t>(allowed.oldest);
    fail(older ? counts_.lost : counts_.future, what + " leaves: " + found.model->text(), made, allowed);
    return false;
  }

  void fail(uint64_t& counter, const std::string& what, size_t made, Allowed allowed) {
    ++counter;
    if (!counts_.first_failure.empty()) return;
    counts_.first_failure = "seed " + std::to_string(seed_) + ", after " + std::to_string(made) + " calls: " + what;
    if (models_) counts_.first_failure += "; must be at least: " + (*models_)[allowed.oldest].text();
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  const double density_;
  const Mutant mutant_;
  const std::vector<Model>* models_ = nullptr;
  std::vector<Promise> promises_;
  std::unordered_set<uint64_t> images_;
  std::unordered_set<uint64_t> states_;
  CrashCounts counts_;
};

}  // namespace

void CrashCounts::add(const CrashCounts& other) {
  workloads += other.workloads;
  images += other.images;
  states += other.states;
  power_cuts += other.power_cuts;
  recovery_cuts += other.recovery_cuts;
  kills += other.kills;
  readers += other.readers;
  rots += other.rots;
  lost_copies += other.lost_copies;
  lost_pairs += other.lost_pairs;
  histories += other.histories;
  collections += other.collections;
  comparisons += other.comparisons;
  lost += other.lost;
  future += other.future;
  false_corruption += other.false_corruption;
  if (first_failure.empty()) first_failure = other.first_failure;
  coverage.add(other.coverage);
}

CrashCounts enumerate_crashes(uint64_t seed, unsigned operations, double density, Mutant mutant) {
  return Enumeration(seed, density, mutant).run(operations);
}

}  // namespace tierload
