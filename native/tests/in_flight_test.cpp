// What the catalog does beside a save in flight, and what that save may rely on. The crash tests say what a power cut
// leaves of it; here are real files, real locks and real threads.
#include "tests/in_flight.h"

#include <doctest/doctest.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <optional>
#include <thread>

#include "tests/model.h"

using namespace tierload;

namespace {

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tierload-in-flight-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
    disk = faulty_storage(posix_storage(path_));
    open();
  }
  ~Folder() {
    catalog = nullptr;
    std::filesystem::remove_all(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  void open(uint64_t roll_bytes = 64 * 1024) {
    catalog = nullptr;
    CatalogOptions options = default_catalog_options();
    options.journal_roll_bytes = roll_bytes;
    options.journal_fill_bytes = 8 * 1024;
    catalog = Catalog::open_for_writing(disk, std::move(options));
  }

  CommitPtr save(uint64_t number, const std::vector<uint64_t>& contents, uint64_t parent = 0) {
    InFlight saving(*catalog, parent);
    saving.write_pages(contents);
    saving.write_manifest();
    return saving.commit(number);
  }

  size_t files(const char* dir) { return disk->list(dir).size(); }

  std::shared_ptr<FaultyStorage> disk;
  std::unique_ptr<Catalog> catalog;

 private:
  std::string path_;
};

// Calls of one kind that `body` makes.
template <typename Body>
uint64_t calls(FaultyStorage& disk, const char* op, Body body) {
  disk.arm({0, Fault::Kind::fail, 0, 1, op});
  body();
  disk.disarm();
  return disk.calls();
}

std::vector<uint64_t> untagged_but_newest(const CatalogState& state, size_t kept) {
  std::vector<uint64_t> drop;
  for (const auto& [txid, commit] : state.commits()) {
    const bool tagged =
        std::any_of(state.tags().begin(), state.tags().end(), [&](const auto& tag) { return tag.second == txid; });
    if (!tagged && drop.size() + kept < state.commits().size()) drop.push_back(txid);
  }
  return drop;
}

}  // namespace

TEST_CASE("a collection leaves the files of the save in flight alone, and removes them once it is given up") {
  Folder folder;
  folder.save(1, {1});
  std::optional<InFlight> saving(std::in_place, *folder.catalog, 1);
  saving->write_pages({1, 2, 3, 4, 5, 6, 7});
  saving->write_manifest();
  const size_t segments = folder.files("seg");
  const size_t manifests = folder.files("man");
  REQUIRE(segments > 2);
  REQUIRE(manifests == 4);
  CHECK(folder.catalog->collect({}).removed_files == 0);
  CHECK(folder.files("seg") == segments);
  CHECK(folder.files("man") == manifests);
  SUBCASE("it commits") {
    saving->commit(2);
    saving.reset();
    folder.catalog->collect({1});
    folder.open();
    CHECK(read_model(*folder.catalog).commits.at(2) == std::vector<uint64_t>{1, 2, 3, 4, 5, 6, 7});
  }
  SUBCASE("it is given up and its files cannot be removed just then") {
    folder.disk->arm({1, Fault::Kind::fail, EIO, 1000, "remove"});
    saving.reset();
    folder.disk->disarm();
    REQUIRE(folder.files("seg") == segments);
    CHECK(folder.catalog->collect({}).removed_files == segments - 1 + 2);
    CHECK(folder.files("seg") == 1);
    CHECK(folder.files("man") == 2);
  }
}

TEST_CASE("pages of a parent that is dropped meanwhile stay for the save that refers to them") {
  Folder folder;
  folder.save(1, {1, 2, 3});
  folder.save(2, {4});
  std::optional<InFlight> saving(std::in_place, *folder.catalog, 1);
  saving->write_pages({1, 3, 5});
  REQUIRE(saving->written().written_pages == 1);
  CHECK(folder.catalog->collect({1}).pinned == 1);
  saving->write_manifest();
  saving->flush();
  CHECK(folder.catalog->collect({}).pinned == 1);
  SUBCASE("it commits") {
    saving->commit(3);
    saving.reset();
    CHECK(folder.catalog->collect({}).freed_bytes > 0);
    folder.open();
    CHECK(read_model(*folder.catalog).commits.at(3) == std::vector<uint64_t>{1, 3, 5});
  }
  SUBCASE("it is given up") {
    saving.reset();
    folder.catalog->collect({});
    CHECK(folder.files("seg") == 1);
    CHECK(folder.files("man") == 2);
  }
}

TEST_CASE("records that wait for a sync outlive a save that is given up beside them") {
  Folder folder;
  folder.catalog->change("before", "1", false);
  std::optional<InFlight> saving(std::in_place, *folder.catalog, 0);
  saving->write_pages({1});
  folder.catalog->change("amid", "2", false);
  SUBCASE("before its commit") { saving.reset(); }
  SUBCASE("by a disk that is full at its commit") {
    saving->write_manifest();
    saving->flush();
    // The room that was made for COMMIT does not reach for this one, so it has to be made, and cannot.
    folder.disk->arm({1, Fault::Kind::fail, ENOSPC, 1000, "write"});
    CHECK_THROWS_AS(saving->commit(1, {std::string(60 * 1024, 't')}), IoError);
    folder.disk->disarm();
    saving.reset();
  }
  CHECK(folder.files("seg") == 0);
  CHECK(folder.files("man") == 0);
  folder.catalog->flush();
  folder.open();
  CHECK(folder.catalog->state().values().size() == 2);
  CHECK(folder.catalog->state().head() == nullptr);
}

TEST_CASE("one save at a time, and no rollback beside it") {
  Folder folder;
  folder.save(1, {1});
  const InFlight saving(*folder.catalog, 1);
  CHECK_THROWS_AS(folder.catalog->begin(), UsageError);
  CHECK_THROWS_AS(folder.catalog->rollback(folder.catalog->state(), "{}"), UsageError);
}

TEST_CASE("a commit after a flush only writes and syncs its record, in both copies of the journal") {
  Folder folder;
  InFlight saving(*folder.catalog, 0);
  saving.write_pages({1, 2, 3});
  saving.flush();
  saving.write_manifest();
  CHECK(calls(*folder.disk, "sync", [&] { saving.flush(); }) == 2);
  const uint64_t journal = folder.catalog->journal_seq();
  for (int i = 0; i < 100; ++i) folder.catalog->change("k", std::string(1000, 'v'), i % 2 == 0);
  REQUIRE(folder.catalog->journal_seq() > journal);
  SUBCASE("syncs") {
    CHECK(calls(*folder.disk, "sync", [&] { saving.commit(1); }) == 2);
  }
  SUBCASE("syncs of directories") {
    CHECK(calls(*folder.disk, "sync_dir", [&] { saving.commit(1); }) == 0);
  }
  SUBCASE("writes: the room for it was kept") {
    CHECK(calls(*folder.disk, "write", [&] { saving.commit(1); }) == 2);
  }
}

TEST_CASE("a record beside a save succeeds where the disk has room for it, and not for a COMMIT as well") {
  Folder folder;
  std::optional<InFlight> saving(std::in_place, *folder.catalog, 0);
  saving->write_pages({1});
  const std::string value(6000, 'v');
  // The group goes into both copies; what is written behind that is room for COMMIT.
  for (int i = 0; i < 10; ++i) {
    folder.disk->arm({3, Fault::Kind::fail, ENOSPC, 1000, "write"});
    folder.catalog->change("k" + std::to_string(i), value, true);
    if (folder.disk->hit()) break;
  }
  REQUIRE(folder.disk->hit());
  folder.disk->disarm();
  saving->write_manifest();
  saving->commit(1);
  saving.reset();
  folder.open();
  CHECK(folder.catalog->state().values().at("k0") == value);
  CHECK(read_model(*folder.catalog).head == 1);
}

TEST_CASE("a journal that the disk has no room to roll serves on") {
  const std::string value(4000, 'v');
  const auto record = [&](Folder& folder, uint64_t number) {
    folder.catalog->change("k" + std::to_string(number), value, true);
  };
  uint64_t rolls_at = 0;
  {
    Folder folder;
    while (folder.catalog->journal_seq() == 0) record(folder, ++rolls_at);
  }
  for (const bool beside : {false, true}) {
    for (const char* op : {"create", "write"}) {
      uint64_t refused = 0;
      for (uint64_t at = 1; at <= 6; ++at) {
        Folder folder;
        std::optional<InFlight> saving;
        if (beside) saving.emplace(*folder.catalog, 0);
        for (uint64_t number = 1; number < rolls_at; ++number) record(folder, number);
        REQUIRE(folder.catalog->journal_seq() == 0);
        const size_t files = folder.files("wal");
        // The record itself is the first two writes; what is not there in both copies has to poison.
        const uint64_t own = std::string(op) == "write" ? 2 : 0;
        folder.disk->arm({own + at, Fault::Kind::fail, ENOSPC, 1, op});
        record(folder, rolls_at);
        const bool hit = folder.disk->hit();
        folder.disk->disarm();
        if (hit && folder.catalog->journal_seq() == 0) {
          ++refused;
          CHECK(folder.files("wal") == files);
          record(folder, rolls_at + 1);
          CHECK(folder.catalog->journal_seq() == 2);
        }
        saving.reset();
        const size_t recorded = folder.catalog->state().values().size();
        folder.open();
        CHECK(folder.catalog->state().values().size() == recorded);
      }
      CHECK(refused >= (std::string(op) == "create" ? 2 : 4));
    }
  }
}

TEST_CASE("a save whose pages did not fit cannot be committed") {
  Folder folder;
  InFlight saving(*folder.catalog, 0);
  folder.disk->arm({1, Fault::Kind::partial, ENOSPC, 1, "write"});
  CHECK_THROWS_AS(saving.write_pages({1}), IoError);
  CHECK_THROWS_AS(saving.flush(), UsageError);
  CHECK_THROWS_AS(saving.commit(1), UsageError);
  CHECK(folder.catalog->change("k", "v", true) > 0);
}

TEST_CASE("a commit whose tag the catalog has no room for has not happened") {
  Folder folder;
  constexpr size_t room = 48u << 20;  // of the catalog
  folder.open(1u << 30);
  folder.catalog->change("large", std::string(room - 30 * 1024, 'v'), true);
  {
    InFlight saving(*folder.catalog, 0);
    saving.write_pages({1});
    saving.write_manifest();
    CHECK_THROWS_AS(saving.commit(1, {std::string(60 * 1024, 't')}), UsageError);
  }
  CHECK(folder.catalog->state().head() == nullptr);
  folder.catalog->change("k", "v", true);
  folder.open();
  CHECK(folder.catalog->state().head() == nullptr);
  CHECK(folder.catalog->state().values().at("k") == "v");
}

TEST_CASE("a store that is closed beside a save in flight tells the thread that writes") {
  Folder folder;
  folder.save(1, {1});
  std::atomic<uint64_t> written{0};
  std::string told;
  auto transaction = folder.catalog->begin();
  std::thread writer([&] {
    const std::vector<std::byte> block(4096);
    const Bytes part(block);
    try {
      for (SegmentRow row;; ++written) {
        if (written % 16 == 0) transaction->shard().open_segment(row, 1 << 16);
        transaction->shard().append(std::span(&part, 1));
      }
    } catch (const PoisonedError& error) {
      told = error.what();
    }
  });
  while (written < 100) std::this_thread::yield();
  folder.catalog->close();
  writer.join();
  CHECK(told.find("it was closed") != std::string::npos);
  CHECK_THROWS_AS(transaction->shard().flush(), PoisonedError);
  CHECK_THROWS_AS(transaction->commit({}, {}), PoisonedError);
  transaction = nullptr;
  folder.open();
  CHECK(folder.files("seg") == 1);
  CHECK(read_model(*folder.catalog).commits.size() == 1);
}

TEST_CASE("threads: one saves, one records, tags and collects") {
  Folder folder;
  Catalog& catalog = *folder.catalog;
  std::mutex lock;  // what a caller has around everything but the slow part of a save
  Model expected;
  std::atomic<uint64_t> rounds{0};
  std::atomic<bool> over{false};
  uint64_t pinned = 0;
  std::string failures;
  const auto guarded = [&](const auto& body) {
    try {
      body();
    } catch (const Error& error) {
      const std::lock_guard guard(lock);
      failures += std::string(error.what()) + "; ";
    }
    over = true;
  };
  const auto some_rounds_pass = [&] {  // a collection among them
    for (const uint64_t before = rounds; rounds < before + 5 && !over;) std::this_thread::yield();
  };
  std::thread saver([&] {
    guarded([&] {
      for (uint64_t number = 1; number <= 40 && !over; ++number) {
        std::optional<InFlight> saving;
        {
          const std::lock_guard guard(lock);
          // Any commit is a parent, the oldest above all: that is the one that is dropped next.
          const auto& commits = catalog.state().commits();
          saving.emplace(catalog, commits.empty() ? 0 : commits.begin()->first);
        }
        const std::vector<uint64_t> contents{1, number / 4 + 1000, number + 2000, number + 3000};
        saving->write_pages(contents);
        if (number % 3 == 0) some_rounds_pass();
        saving->write_manifest();
        saving->flush();
        some_rounds_pass();
        const std::lock_guard guard(lock);
        if (number % 5 != 0) {
          saving->commit(number, {"newest"});
          expected.commits[number] = contents;
          expected.head = expected.tags["newest"] = number;
        }
        saving.reset();
      }
    });
  });
  std::thread other([&] {
    guarded([&] {
      for (uint64_t round = 1; !over; ++round) {
        {
          const std::lock_guard guard(lock);
          const CatalogState& state = catalog.state();
          const std::string value(1 + round % 700, 'v');
          catalog.change("k", value, round % 2 == 0);
          expected.values["k"] = value;
          if (state.head() && round % 3 == 0) {
            catalog.tag("other", state.head()->txid);
            expected.tags["other"] = number_of(*state.head());
          }
          if (round % 4 == 0) {
            const std::vector<uint64_t> drop = untagged_but_newest(state, 4);
            for (const uint64_t txid : drop) expected.commits.erase(number_of(*state.find(txid)));
            pinned += catalog.collect(drop).pinned;
          }
          if (round % 7 == 0) catalog.records_after(0);
          if (state.head() && round % 5 == 0) catalog.open_manifest(state.head()->txid);
        }
        ++rounds;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  });
  saver.join();
  other.join();
  CHECK(failures == "");
  CHECK(pinned > 0);
  CHECK(catalog.journal_seq() > 0);
  CHECK(read_model(catalog).text() == expected.text());
  catalog.flush();
  folder.open();
  CHECK(read_model(*folder.catalog).text() == expected.text());
}
