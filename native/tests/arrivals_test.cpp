// Pages that arrive by urgency: their order, whoever waits for them, and pages that are damaged.
#include "tierload/arrivals.h"

#include <doctest/doctest.h>

#include <numeric>
#include <thread>

#include "tests/in_flight.h"
#include "tests/model.h"
#include "tests/simulated.h"
#include "tests/workload.h"

namespace tierload {
namespace {

using namespace std::chrono_literals;

// A commit of pages, unit `i` being page `i`, and memory that they go to.
struct Fixture {
  explicit Fixture(size_t pages) : storage(std::make_shared<SimulatedStorage>()), contents(pages), memory(pages) {
    std::iota(contents.begin(), contents.end(), 1);
    const auto catalog = Catalog::open_for_writing(storage, workload_options(1, Mutant::none));
    InFlight saving(*catalog, 0);
    saving.write_pages(contents);
    saving.write_manifest();
    manifest = catalog->open_manifest(saving.commit(1, {})->txid);
    for (uint32_t page = 0; page < pages; ++page) {
      memory[page].resize(page_bytes(contents[page]).size());
      source.parts.push_back({page, 0, memory[page]});
      source.units.push_back(page);
    }
    source.manifest = manifest.get();
  }

  std::unique_ptr<Arrivals> arrivals(std::vector<uint32_t> ranks, unsigned threads = 1) const {
    return std::make_unique<Arrivals>(storage, std::vector{source}, std::move(ranks), threads);
  }
  bool there(size_t page) const { return memory[page] == page_bytes(contents[page]); }

  std::shared_ptr<SimulatedStorage> storage;
  std::vector<uint64_t> contents;
  std::vector<std::vector<std::byte>> memory;
  std::unique_ptr<Manifest> manifest;
  ArrivingParts source;
};

}  // namespace

TEST_CASE("units arrive in the order of their ranks") {
  const Fixture fixture(6);
  const auto arrivals = fixture.arrivals({3, 2, 5, 0, 1, 4});
  CHECK(arrivals->queued() == 6);
  arrivals->work();
  CHECK(arrivals->next(0ns) == std::vector<uint32_t>{3, 4, 1, 0, 5, 2});
  CHECK(arrivals->over());
  CHECK(arrivals->next(1h).empty());
  for (uint32_t page = 0; page < 6; ++page) CHECK((arrivals->arrived(page) && fixture.there(page)));
  CHECK(arrivals->bytes() == arrivals->total_bytes());
}

TEST_CASE("what is demanded comes first, in the order of demands, and new ranks count for the rest") {
  const Fixture fixture(6);
  const auto arrivals = fixture.arrivals({0, 1, 2, 3, 4, 5});
  arrivals->demand(4);
  arrivals->demand(2);
  const std::vector<uint32_t> units{2, 0, 5};
  const std::vector<uint32_t> ranks{9, 8, 0};
  arrivals->order(units, ranks);
  arrivals->work();
  CHECK(arrivals->next(0ns) == std::vector<uint32_t>{4, 2, 5, 1, 3, 0});
}

TEST_CASE("a unit waits for all of its pages, and a page brings all units that it holds parts of") {
  Fixture fixture(3);
  std::vector<std::byte> middle(100);
  fixture.source.parts.insert(fixture.source.parts.begin() + 2, {1, 50, middle});
  fixture.source.units = {0, 0, 3, 2};
  const auto arrivals = fixture.arrivals({2, 0, 1, 0});
  arrivals->work();
  CHECK(arrivals->next(0ns) == std::vector<uint32_t>{1, 3, 2, 0});  // unit 1 has no bytes
  const auto page = page_bytes(fixture.contents[1]);
  CHECK(std::equal(middle.begin(), middle.end(), page.begin() + 50));
}

TEST_CASE("a damaged page is the failure of its unit alone") {
  const Fixture fixture(4);
  const PageRow& row = fixture.manifest->pages()[2];
  const std::string path = fixture.manifest->segments()[row.segment].path();
  std::byte byte{};
  fixture.storage->open(path, OpenMode::read)->read(row.offset + 7, MutableBytes(&byte, 1));
  byte ^= std::byte{1};
  fixture.storage->open(path, OpenMode::read_write)->write(row.offset + 7, Bytes(&byte, 1));
  const auto arrivals = fixture.arrivals({0, 1, 2, 3}, 2);
  std::thread other([&] { arrivals->work(); });
  arrivals->work();
  other.join();
  CHECK(arrivals->wait(3, 0ns));
  CHECK_FALSE(arrivals->arrived(2));
  for (int again = 0; again < 2; ++again) {
    CHECK_THROWS_WITH_AS(arrivals->wait(2, 1h), doctest::Contains("the stored bytes do not match"), CorruptPageError);
  }
  REQUIRE(arrivals->failures().size() == 1);
  CHECK(arrivals->failures()[0].second.path == path);
}

TEST_CASE("what is stopped lets nobody wait") {
  const Fixture fixture(4);
  const auto arrivals = fixture.arrivals({0, 1, 2, 3});
  bool there = true;
  std::thread waits([&] { there = arrivals->wait(1, 1h); });
  arrivals->stop();
  waits.join();
  CHECK_FALSE(there);
  CHECK(arrivals->over());
  arrivals->work();
  CHECK_FALSE(arrivals->arrived(0));
}

TEST_CASE("nothing to fetch is over at once") {
  const auto arrivals = std::make_unique<Arrivals>(nullptr, std::vector<ArrivingParts>{}, std::vector<uint32_t>{}, 1);
  arrivals->work();
  CHECK(arrivals->over());
}

}  // namespace tierload
