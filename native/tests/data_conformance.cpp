// What every Storage must do when it moves data: appending and fetching.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "conformance.h"

using tierload::Bytes;
using tierload::Fetch;
using tierload::FetchOrder;
using tierload::OpenMode;
using tierload::Storage;

namespace {

// Bytes that tell where they are.
std::vector<std::byte> numbered(uint64_t size, uint64_t seed) {
  std::vector<std::byte> bytes(size);
  for (uint64_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((i * 2654435761u + seed) >> 13);
  return bytes;
}

void appending(Storage& storage) {
  const std::vector<std::byte> bytes = numbered(5 * 4096 * 171, 1);
  const auto fill = [&](const std::string& path, uint64_t expected) {
    const auto file = storage.open(path, OpenMode::create);
    const auto appender = storage.append(*file, path, expected);
    for (uint64_t at = 0, step = 1; at < bytes.size(); step = step % 60 + 7) {
      const uint64_t length = std::min<uint64_t>(step * 4096, bytes.size() - at);
      std::vector<std::byte> reused(bytes.begin() + static_cast<ptrdiff_t>(at),
                                    bytes.begin() + static_cast<ptrdiff_t>(at + length));
      const uint64_t cut = length / 3 + 1;  // parts end anywhere, calls at whole blocks
      const std::array<Bytes, 3> parts = {Bytes(reused).first(cut), Bytes{}, Bytes(reused).subspan(cut)};
      appender->append(parts);
      std::fill(reused.begin(), reused.end(), std::byte{0xEE});
      at += length;
    }
    appender->finish();
    file->sync();
    CHECK(file->size() == bytes.size());
    std::vector<std::byte> got(bytes.size());
    CHECK(file->read(0, got) == bytes.size());
    CHECK(got == bytes);
  };
  SUBCASE("what was appended is in the file, and nothing else, however good the guess was") {
    fill("exact", bytes.size());
    fill("more", bytes.size() * 3);
    fill("less", 4096);
    fill("none", 0);
  }
  SUBCASE("nothing appended is an empty file") {
    const auto file = storage.open("empty", OpenMode::create);
    storage.append(*file, "empty", 1 << 20)->finish();
    CHECK(file->size() == 0);
  }
  SUBCASE("an appender that is given up leaves the file to be removed") {
    const auto file = storage.open("given-up", OpenMode::create);
    auto appender = storage.append(*file, "given-up", bytes.size());
    const Bytes part = Bytes(bytes).first(4096 * 300);
    appender->append(std::span(&part, 1));
    appender.reset();
    CHECK(storage.remove("given-up"));
  }
}

// Names ranges in any order.
class Shuffled : public FetchOrder {
 public:
  explicit Shuffled(size_t ranges) : left_(ranges) {
    std::iota(left_.begin(), left_.end(), 0);
    std::shuffle(left_.begin(), left_.end(), std::mt19937_64(5));
  }
  size_t next() override {
    const size_t range = left_.back();
    left_.pop_back();
    return range;
  }

 private:
  std::vector<size_t> left_;
};

// More files than a ring knows at a time, and another one with every range.
void fetching_many_files(Storage& storage) {
  std::vector<std::string> names;
  std::vector<Fetch::Range> ranges;
  for (uint32_t file = 0; file < 70; ++file) {
    names.push_back("many" + std::to_string(file));
    storage.open(names.back(), OpenMode::create)->write(0, Bytes(numbered(1 << 18, file)));
    for (uint64_t at = 0; at < 1 << 18; at += 1 << 16) ranges.push_back({file, at, 1 << 16, nullptr});
  }
  Shuffled order(ranges.size());
  const auto fetch = storage.fetch(names, ranges, 2, &order);
  size_t good = 0;
  while (const auto arrival = fetch->next()) {
    const Fetch::Range& range = ranges[arrival->range];
    const auto want = numbered(1 << 18, range.file);
    if (std::equal(arrival->bytes.begin(), arrival->bytes.end(), want.begin() + static_cast<ptrdiff_t>(range.offset))) {
      ++good;
    }
    fetch->release(*arrival);
  }
  CHECK(good == ranges.size());
}

void fetching(Storage& storage) {
  const std::vector<std::string> names = {"one", "two", "missing", "dir", "short"};
  const std::vector<std::byte> one = numbered(1 << 20, 1);
  const std::vector<std::byte> two = numbered(3 << 20, 2);
  storage.open("one", OpenMode::create)->write(0, Bytes(one));
  storage.open("two", OpenMode::create)->write(0, Bytes(two));
  storage.open("short", OpenMode::create)->write(0, Bytes(one).first(8192));
  storage.make_dir("dir");
  std::vector<Fetch::Range> ranges;
  for (uint64_t at = 0; at + 70'000 < one.size(); at += 70'001) ranges.push_back({0, at, 70'000, nullptr});
  std::vector<std::byte> straight(two.size());
  for (uint64_t at = 0; at < two.size(); at += 1 << 19) {
    ranges.push_back({1, at, uint64_t{1} << 19, at % (1 << 20) == 0 ? straight.data() + at : nullptr});
  }
  for (int i = 0; i < 3; ++i) ranges.push_back({2, 4096, 4096, nullptr});
  ranges.push_back({3, 0, 4096, nullptr});
  ranges.push_back({4, 4096, 8192, nullptr});
  ranges.push_back({4, 16384, 4096, nullptr});
  for (const auto& [threads, shuffled] : {std::pair(1u, false), {3u, false}, {1u, true}, {3u, true}}) {
    CAPTURE(threads);
    Shuffled order(ranges.size());
    const auto fetch = storage.fetch(names, ranges, threads, shuffled ? &order : nullptr);
    std::mutex mutex;
    std::vector<int> seen(ranges.size(), 0);
    std::vector<std::string> wrong;
    const auto take = [&] {
      while (const auto arrival = fetch->next()) {
        const Fetch::Range& range = ranges[arrival->range];
        bool good = false;
        if (range.file <= 1) {
          const Bytes want = Bytes(range.file == 0 ? one : two).subspan(range.offset, range.length);
          good = arrival->error.empty() &&
                 std::equal(arrival->bytes.begin(), arrival->bytes.end(), want.begin(), want.end());
          if (range.into != nullptr) good = good && arrival->bytes.data() == range.into;
        } else if (range.file <= 3) {
          good = !arrival->error.empty() && arrival->bytes.empty();
        } else {
          good = arrival->error.empty() && arrival->bytes.size() == (range.offset == 4096 ? 4096 : 0);
        }
        const std::lock_guard guard(mutex);
        ++seen[arrival->range];
        if (!good) wrong.push_back(std::to_string(arrival->range) + ": " + arrival->error);
        fetch->release(*arrival);
      }
    };
    std::vector<std::thread> pool;
    for (unsigned i = 0; i < threads; ++i) pool.emplace_back(take);
    for (std::thread& thread : pool) thread.join();
    CHECK(wrong == std::vector<std::string>{});
    CHECK(seen == std::vector<int>(ranges.size(), 1));
  }
  SUBCASE("a fetch may be left before its end") {
    const auto fetch = storage.fetch(names, ranges, 2);
    const auto arrival = fetch->next();
    REQUIRE(arrival);
    fetch->release(*arrival);
  }
  SUBCASE("no ranges") { CHECK_FALSE(storage.fetch({}, {}, 1)->next()); }
}

}  // namespace

void data_conformance(const std::function<std::shared_ptr<Storage>()>& fresh) {
  const std::shared_ptr<Storage> storage = fresh();
  storage->make_dir("");
  SUBCASE("appending") { appending(*storage); }
  SUBCASE("fetching") { fetching(*storage); }
  SUBCASE("fetching from many files in any order") { fetching_many_files(*storage); }
}
