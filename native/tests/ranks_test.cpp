// Several ranks, one commit: every crash between the first page and the acknowledgement, and what rank 0 refuses.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "catalog/names.h"
#include "tests/power_cut.h"
#include "tests/ranks_in_flight.h"
#include "tests/recovery.h"
#include "tierload/root.h"

using namespace tierload;

namespace {

CatalogOptions options(Mutant mutant = Mutant::none) { return workload_options(1, mutant); }

RankContents contents_of(uint32_t ranks, uint64_t first) {
  RankContents contents;
  for (uint32_t rank = 0; rank < ranks; ++rank) contents.push_back({first + 10 * rank, first + 10 * rank + 1});
  return contents;
}

// The ranks take turns at every step.
void write(RanksInFlight& saving, const RankContents& contents) {
  const auto ranks = static_cast<uint32_t>(contents.size());
  for (uint32_t rank = 0; rank < ranks; ++rank) saving.write_pages(rank, contents[rank]);
  for (uint32_t rank = 0; rank < ranks; ++rank) saving.write_manifest(rank);
  for (uint32_t rank = ranks; rank-- > 0;) saving.flush(rank);
}

struct Job {
  explicit Job(Mutant mutant = Mutant::none) : catalog(Catalog::open_for_writing(disk, options(mutant))) {}
  CommitPtr save(uint64_t number, const RankContents& contents, uint64_t parent = 0) {
    RanksInFlight saving(*catalog, disk, parent, static_cast<uint32_t>(contents.size()));
    write(saving, contents);
    return saving.commit(number, saving.rows());
  }
  // What a kill of every process leaves.
  Found left() { return recover(std::make_shared<SimulatedStorage>(disk->now()), options(), true); }
  std::set<std::string> files() {
    std::set<std::string> all;
    for (const char* dir : {"man", "seg"}) {
      for (const std::string& file : disk->list(dir)) all.insert(file);
    }
    return all;
  }
  std::shared_ptr<SimulatedStorage> disk = std::make_shared<SimulatedStorage>();
  std::unique_ptr<Catalog> catalog;
};

// Whether every state that a crash after some call of the second save leaves is the one before it or the one after it,
// whole, and the one after it once that was acknowledged.
struct Crashes {
  uint64_t states = 0;
  uint64_t bad = 0;
};
Crashes crash_everywhere(uint32_t ranks, Mutant mutant) {
  Job job(mutant);
  const RankContents first = contents_of(ranks, 100);
  RankContents second = contents_of(ranks, 200);
  second[1][0] = first[ranks - 1][0];  // a page that another rank wrote
  const CommitPtr before = job.save(1, first);
  const size_t begun = job.disk->calls().size();
  job.save(2, second, before->txid);
  const size_t acknowledged = job.disk->calls().size();
  Model old;
  old.commits[1] = joined(first);
  old.head = 1;
  Model fresh = old;
  fresh.commits[2] = joined(second);
  fresh.head = 2;

  Crashes crashes;
  std::mt19937_64 random(ranks);
  std::set<uint64_t> seen;
  const auto check = [&](const std::shared_ptr<SimulatedStorage>& disk, size_t made) {
    ++crashes.states;
    const Found found = recover(disk, options(mutant), true);
    const bool holds = found.model && (*found.model == fresh || (made < acknowledged && *found.model == old));
    crashes.bad += holds ? 0 : 1;
  };
  PowerCut cut{Image{}};
  const std::vector<Call>& calls = job.disk->calls();
  for (size_t made = 1; made <= calls.size(); ++made) {
    cut.advance(calls[made - 1]);
    if (made < begun) continue;
    check(std::make_shared<SimulatedStorage>(cut.durable(), cut.pending()), made);  // every process is killed
    cut.visit(30, random, [&](const Image& image) {
      if (seen.insert(image.hash() + (made < acknowledged ? 0 : 1)).second) {
        check(std::make_shared<SimulatedStorage>(image), made);
      }
    });
  }
  return crashes;
}

}  // namespace

TEST_CASE("a kill or a power cut at any call of two phases leaves all ranks' states or none") {
  for (const uint32_t ranks : {2u, 3u}) {
    CAPTURE(ranks);
    const Crashes crashes = crash_everywhere(ranks, Mutant::none);
    CHECK(crashes.states > 300);
    CHECK(crashes.bad == 0);
  }
  CHECK(crash_everywhere(2, Mutant::no_shard_sync).bad > 0);
  CHECK(crash_everywhere(2, Mutant::root_after_commit).bad > 0);
}

TEST_CASE("a rank that dies at any of its calls takes nothing with it but the attempt") {
  for (uint64_t call = 1;; ++call) {
    Job job;
    job.save(1, contents_of(3, 100));
    const auto before = job.files();
    std::optional<RanksInFlight> saving(std::in_place, *job.catalog, job.disk, 1, 3);
    saving->storage_of(2).arm({call, Fault::Kind::partial, EIO, UINT64_MAX / 2, ""});
    try {
      write(*saving, contents_of(3, 200));
      REQUIRE(call > 10);  // it has that many calls at least
      break;
    } catch (const IoError&) {
      CHECK_THROWS_AS(saving->row(2), UsageError);
    }
    const std::unique_ptr<RankWriter> dead = saving->part_with(2);
    saving.reset();
    CHECK(job.files() == before);
    job.save(2, contents_of(3, 300), 1);
    const auto found = job.left();
    REQUIRE(found.error == "");
    CHECK(found.model->head == 2);
    CHECK(found.model->commits.size() == 2);
  }
}

TEST_CASE("a rank that has handed its row in leaves its files, which may be committed") {
  Job job;
  SUBCASE("they are") {
    RanksInFlight saving(*job.catalog, job.disk, 0, 2);
    write(saving, contents_of(2, 100));
    const auto rows = saving.rows();
    saving.part_with(1).reset();
    saving.commit(1, rows);
    CHECK(job.catalog->check_commit(1) == "");
  }
  SUBCASE("they are not: rank 0 removes them") {
    std::optional<RanksInFlight> saving(std::in_place, *job.catalog, job.disk, 0, 2);
    write(*saving, contents_of(2, 100));
    saving->part_with(1).reset();
    CHECK(job.files().size() > 4);
    saving.reset();
    CHECK(job.files().empty());
  }
  SUBCASE("rank 0 is killed: whoever opens next removes them") {
    RanksInFlight saving(*job.catalog, job.disk, 0, 2);
    write(saving, contents_of(2, 100));
    const auto disk = std::make_shared<SimulatedStorage>(job.disk->now());
    CHECK(Catalog::open_for_writing(disk, options())->state().commits().empty());
    CHECK(disk->list("man").empty());
    CHECK(disk->list("seg").empty());
  }
}

TEST_CASE("a rank that thaws under another writer hands nothing in, and its files are collected") {
  Job job;
  job.save(1, contents_of(2, 100));
  RanksInFlight saving(*job.catalog, job.disk, 1, 2);
  saving.write_pages(1, {200, 201});
  CatalogOptions over = options();
  over.take_over = true;
  const auto next = Catalog::open_for_writing(job.disk, std::move(over));
  const auto thawed = saving.part_with(1);
  write_manifest_of(thawed->shard(), saving.written(1));
  CHECK_THROWS_AS(thawed->prepare(), FencedError);
  CHECK_THROWS_AS(thawed->row(), UsageError);
  next->collect({});
  CHECK(std::ranges::none_of(job.files(), [](const std::string& file) { return parse_data_name(file)->txid == 2; }));
  CHECK(next->check_commit(1) == "");
}

TEST_CASE("a rank looks for its own store, not for any") {
  Job job;
  const Attempt attempt{job.catalog->epoch(), 1, 2};
  StoreId other = job.catalog->store_id();
  other[0] ^= std::byte{1};
  check_epoch(*job.disk, job.catalog->store_id(), attempt.epoch);
  CHECK_THROWS_AS(check_epoch(*job.disk, other, attempt.epoch), FencedError);
  CHECK_THROWS_AS(check_epoch(*job.disk, job.catalog->store_id(), attempt.epoch - 1), FencedError);
  CHECK_THROWS_AS(check_epoch(*job.disk, job.catalog->store_id(), attempt.epoch + 1), FencedError);
  CHECK_THROWS_AS(check_epoch(*std::make_shared<SimulatedStorage>(), job.catalog->store_id(), 1), FencedError);
  CHECK_THROWS_AS(RankWriter(job.disk, other, attempt, 0), UsageError);
  CHECK_THROWS_AS(RankWriter(job.disk, other, attempt, 2), UsageError);
}

TEST_CASE("rank 0 takes a row of this attempt, or of a commit, and no other") {
  Job job;
  const RankContents first = contents_of(2, 100);
  job.save(1, first);
  const auto committed = job.catalog->root(1);
  RanksInFlight saving(*job.catalog, job.disk, 1, 2);
  write(saving, contents_of(2, 200));
  const auto rows = saving.rows();
  const auto refused = [&](std::vector<RootRow> handed_in, const std::string& why) {
    CAPTURE(why);
    CHECK_THROWS_WITH_AS(saving.commit(2, handed_in), doctest::Contains(why.c_str()), UsageError);
  };
  refused({rows[0]}, "needs a row of each, not 1");
  refused({rows[0], rows[1], rows[1]}, "needs a row of each, not 3");
  refused({rows[1], rows[0]}, "the row of rank 0 is that of rank 1");
  RootRow wrong = rows[1];
  wrong.txid += 1;
  refused({rows[0], wrong}, "the shard of rank 1 is of transaction 3, the commit is of 2");
  wrong = rows[1];
  wrong.epoch += 1;
  refused({rows[0], wrong}, "the shard of rank 1 is of epoch 2, the commit is of 1");
  wrong = committed[1];
  wrong.digest.low ^= 1;
  refused({rows[0], wrong}, "rank 1 handed in the shard of transaction 1, which no commit has");
  CHECK(saving.commit(2, {rows[0], committed[1]})->ranks == 2);
  const auto found = job.left();
  REQUIRE(found.error == "");
  CHECK(found.model->commits.at(2) == joined({contents_of(2, 200)[0], first[1]}));
}

TEST_CASE("a shard that did not change outlives the commit that had it") {
  Job job;
  const RankContents first = contents_of(2, 100);
  job.save(1, first);
  job.save(2, contents_of(2, 200));
  std::optional<RanksInFlight> saving(std::in_place, *job.catalog, job.disk, 1, 2);
  saving->refer(1);
  saving->flush(1);
  SUBCASE("that is dropped before the next one is made") {
    saving->write_pages(0, {300});
    CHECK(job.catalog->collect({1}).pinned == 2);
    saving->write_manifest(0);
    saving->flush(0);
    saving->commit(3, saving->rows());
    saving.reset();
    job.catalog->collect({2});
    const auto found = job.left();
    REQUIRE(found.error == "");
    CHECK(found.model->commits.at(3) == joined({{300}, first[1]}));
  }
  SUBCASE("unless nobody wants it any more") {
    saving.reset();
    job.catalog->collect({1});
    for (const std::string& file : job.files()) CHECK(parse_data_name(file)->txid == 2);
  }
}

TEST_CASE("a store that had one rank is marked before several write into it, and one rank can go on") {
  Job job;
  CHECK(job.catalog->journal_seq() == 0);
  job.catalog->begin(2).reset();
  CHECK(job.catalog->journal_seq() == 1);
  job.catalog->begin(3).reset();
  CHECK(job.catalog->journal_seq() == 1);
  const auto is_marked = [&](const std::string& path, uint64_t header) {
    std::byte mark{};
    job.disk->open(path, OpenMode::read)->read(header + 24, MutableBytes(&mark, 1));
    return mark == std::byte{1};
  };
  CHECK(is_marked("SUPER", 0));
  CHECK(is_marked("SUPER", 4096));
  CHECK_FALSE(is_marked("wal/c-00000001-00000000", 0));
  CHECK(is_marked("wal/c-00000001-00000001", 0));
  CHECK(is_marked("wal/m-00000001-00000001", 0));
  uint64_t parent = 0;
  {
    InFlight alone(*job.catalog, 0);
    alone.write_pages({1});
    alone.write_manifest();
    parent = alone.commit(1)->txid;
  }
  job.catalog = nullptr;
  job.catalog = Catalog::open_for_writing(job.disk, options());
  CHECK(is_marked("wal/c-00000002-00000000", 0));
  job.save(2, contents_of(3, 100), parent);
  CHECK(job.left().model->commits.size() == 2);
  CHECK_THROWS_AS(job.catalog->begin(ranks_max + 1), UsageError);
  CHECK_THROWS_AS(job.catalog->begin(0), UsageError);
}

TEST_CASE("names of root files are told from those of shards and segments") {
  const auto name = parse_data_name("00000002-000000000007.root.m");
  REQUIRE(name);
  CHECK(name->of_root());
  CHECK_FALSE(name->of_manifest());
  CHECK(name->epoch == 2);
  CHECK(name->txid == 7);
  CHECK("man/00000002-000000000007.root" == root_path(2, 7));
  CHECK(parse_data_name("00000002-000000000007.r000f")->of_manifest());
  CHECK_FALSE(parse_data_name("00000002-000000000007.r000f")->of_root());
  CHECK(parse_data_name("00000002-000000000007.r000f.0001")->of_segment());
  for (const char* other : {"00000002-000000000007.root.0001", "00000002-000000000007.roots"}) {
    const auto parsed = parse_data_name(other);
    CHECK((!parsed || !(parsed->of_root() || parsed->of_manifest() || parsed->of_segment())));
  }
  CHECK_FALSE(parse_data_name("0000000A-000000000007.root"));
  CHECK_FALSE(parse_data_name("00000002-000000000007.roo"));
}

TEST_CASE("rows come back from a root file of many ranks, and what is changed in it is found") {
  constexpr uint32_t ranks = 3000;
  std::vector<RootRow> rows(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) rows[rank] = {rank, 0, 2, 1 + rank % 7, 256 + rank, {rank, 5}};
  const SealedFile sealed = encode_root(rows, 2, 7);
  const RootRow pin{0, 0, 2, 7, sealed.body_length, sealed.digest};
  CHECK(sealed.body_length == root_body_length(ranks));
  SimulatedStorage disk;
  for (const char* dir : {"", "man"}) disk.make_dir(dir);
  for (const char* copy : {"", ".m"}) {
    disk.open(root_path(2, 7) + copy, OpenMode::create)->write(0, Bytes(sealed.file));
  }
  CHECK(read_root(disk, pin, ranks, nullptr) == rows);
  CHECK_THROWS_WITH_AS(read_root(disk, pin, ranks - 1, nullptr), doctest::Contains("by 3000 ranks"), CorruptError);
  const std::byte flipped = sealed.file[100'000] ^ std::byte{4};
  disk.open(root_path(2, 7), OpenMode::read_write)->write(100'000, Bytes(&flipped, 1));
  CHECK(check_root_copy(disk, pin, false).find("do not match their digest") != std::string::npos);
  CHECK(check_root_copy(disk, pin, true) == "");
  std::vector<std::string> warnings;
  CHECK(read_root(disk, pin, ranks, &warnings) == rows);
  CHECK(warnings.size() == 1);
  disk.remove(root_path(2, 7) + ".m");
  CHECK_THROWS_AS(read_root(disk, pin, ranks, nullptr), CorruptError);
}
