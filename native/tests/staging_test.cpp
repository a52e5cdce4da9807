// A copy of a state beside its changes: what is copied when, in waves too, and that nobody waits for ever.
#include "tierload/staging.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "tierload/bytes.h"
#include "tierload/error.h"

using namespace tierload;

namespace {

// Pages over memory of their own; page i is filled with i.
struct Pages {
  explicit Pages(const std::vector<size_t>& sizes) : set(std::make_shared<PageSet>()) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      memory.emplace_back(sizes[i], static_cast<std::byte>(i));
      set->parts.push_back({memory.back().data(), sizes[i]});
    }
    for (const SourcePart& part : set->parts) set->sources.push_back({std::span(&part, 1), 4, true, false});
  }
  void change() {
    for (auto& page : memory) std::fill(page.begin(), page.end(), std::byte{0xEE});
  }
  std::vector<std::vector<std::byte>> memory;
  std::shared_ptr<PageSet> set;
};

bool holds(const PageSource& page, size_t number, size_t size) {
  REQUIRE(page.parts.size() == 1);
  const SourcePart& part = page.parts[0];
  return part.length == size &&
         std::all_of(part.base, part.base + size, [&](std::byte b) { return b == static_cast<std::byte>(number); });
}

constexpr std::chrono::seconds for_ever{-1};

}  // namespace

TEST_CASE("what is not late is copied before the call returns, the rest by whoever needs it") {
  const std::vector<size_t> sizes{4096, 100, 1 << 20, 5000, 3 << 20};
  Pages pages(sizes);
  const std::vector<uint8_t> late{0, 0, 1, 0, 1};
  auto arena = std::make_shared<Arena>(Staging::bytes_of(*pages.set));
  Staging staging(pages.set, late, arena);
  CHECK(staging.keeps_all());
  CHECK(staging.reach() == sizes.size());
  staging.copy_now(2);
  CHECK(!staging.complete());
  CHECK(!staging.wait_done(std::chrono::nanoseconds(0)));
  CHECK(staging.copied_bytes() == 4096 + 100 + 5000);
  for (const size_t now : {size_t{0}, size_t{1}, size_t{3}}) {
    staging.wait(now);
    CHECK(holds(staging.sources()[now], now, sizes[now]));
    std::fill(pages.memory[now].begin(), pages.memory[now].end(), std::byte{0xEE});
  }
  staging.help(2);
  CHECK(staging.complete());
  pages.change();
  for (size_t page = 0; page < sizes.size(); ++page) CHECK(holds(staging.sources()[page], page, sizes[page]));
  CHECK(staging.copied_bytes() == staging.raw_bytes());
}

TEST_CASE("pages of parts that lie apart are copied like others") {
  std::vector<uint32_t> numbers(64);
  std::iota(numbers.begin(), numbers.end(), 0);
  auto set = std::make_shared<PageSet>();
  const std::vector<uint64_t> counts{8, 4};
  const std::vector<int64_t> strides{32, 8};
  set->views.emplace_back(4, counts, strides);
  const auto* base = reinterpret_cast<const std::byte*>(numbers.data());
  set->parts = {{base, 128, &set->views[0], 0}, {base + 4, 8}};
  set->sources = {{std::span(set->parts), 4, false, true}};
  const std::vector<uint8_t> late{0};
  Staging staging(set, late, std::make_shared<Arena>(Staging::bytes_of(*set)));
  staging.copy_now(1);
  const auto* copy = reinterpret_cast<const uint32_t*>(staging.sources()[0].parts[0].base);
  CHECK(staging.sources()[0].parts[0].length == 136);
  for (uint32_t i = 0; i < 32; ++i) CHECK(copy[i] == i * 2);
  CHECK(copy[32] == 1);
  CHECK(copy[33] == 2);
}

TEST_CASE("with less memory than the state has, pages take the place of those that were written") {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    std::vector<size_t> sizes(2 + random() % 40);
    for (size_t& size : sizes) size = 1 + random() % 20000;
    Pages pages(sizes);
    std::vector<uint8_t> late(sizes.size());
    for (uint8_t& flag : late) flag = random() % 2;
    const uint64_t room = 2 * round_up(20000, 4096) + (random() % 8) * 4096;
    Staging staging(pages.set, late, std::make_shared<Arena>(room));
    size_t last_now = 0;
    for (size_t page = 0; page < sizes.size(); ++page) last_now = late[page] ? last_now : page + 1;
    size_t written = 0;
    std::thread writer([&] {
      while (written < sizes.size()) {
        staging.wait(written);
        if (!holds(staging.sources()[written], written, sizes[written])) break;
        staging.release(++written);
      }
      staging.release(sizes.size());
    });
    staging.copy_now(static_cast<unsigned>(1 + random() % 3));
    for (size_t page = 0; page < last_now; ++page) {
      if (!late[page]) std::fill(pages.memory[page].begin(), pages.memory[page].end(), std::byte{0xEE});
    }
    staging.start();
    if (random() % 2 == 0) staging.help(2);
    CHECK(staging.wait_done(for_ever));
    pages.change();
    writer.join();
    CHECK(written == sizes.size());
    CHECK(staging.reach() >= 1);
  }
}

TEST_CASE("in waves, what must not change later does not wait until other pages are written") {
  std::vector<size_t> sizes(30, 8192);
  Pages pages(sizes);
  std::vector<uint8_t> late(30, 1);
  late[3] = late[29] = 0;
  Staging staging(pages.set, late, std::make_shared<Arena>(8 * 8192));
  CHECK(!staging.keeps_all());
  staging.copy_now(1);  // nothing was released yet
  CHECK(staging.copied_bytes() == 2 * 8192);
  CHECK(staging.reach() == 7);  // six late pages and one that is not
  staging.start();
  for (size_t page = 0; page < sizes.size(); ++page) {
    staging.wait(page);
    CHECK(holds(staging.sources()[page], page, sizes[page]));
    staging.release(page + 1);
  }
  CHECK(staging.wait_done(for_ever));
}

TEST_CASE("nobody waits for a copy that was given up") {
  Pages pages(std::vector<size_t>(50, 8192));
  const std::vector<uint8_t> late(50, 1);
  Staging staging(pages.set, late, std::make_shared<Arena>(4 * 8192));
  CHECK(!staging.keeps_all());
  staging.start();  // nothing is ever released, so it cannot end
  std::thread helper([&] { staging.help(2); });
  std::thread writer([&] { CHECK_THROWS_AS(staging.wait(49), CancelledError); });
  staging.abandon();
  helper.join();
  writer.join();
  CHECK(staging.wait_done(for_ever));
  CHECK(!staging.complete());
}

TEST_CASE("an arena that is too small for two pages is refused") {
  Pages pages({1 << 16, 1 << 16});
  const std::vector<uint8_t> late{0, 0};
  CHECK_THROWS_AS(Staging(pages.set, late, std::make_shared<Arena>(1 << 16)), UsageError);
}

TEST_CASE("an arena can be touched while it is in use") {
  Arena arena(9 << 20);
  std::memset(arena.memory().data(), 7, arena.memory().size());
  arena.prefault(3);
  CHECK(std::all_of(arena.memory().begin(), arena.memory().end(), [](std::byte b) { return b == std::byte{7}; }));
}
