#include "state/leaves.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>

namespace tierload {
namespace {

using Ranges = std::vector<MemoryRange>;

bool meet(const MemoryRange& left, const MemoryRange& right) {
  return left.start < right.end && right.start < left.end;
}

// Every pair is looked at.
std::vector<uint32_t> meeting_pairs(const Ranges& ranges, const Ranges& others) {
  std::vector<uint32_t> found;
  for (uint32_t i = 0; i < ranges.size(); ++i) {
    bool meets = std::ranges::any_of(others, [&](const MemoryRange& other) { return meet(ranges[i], other); });
    for (size_t j = 0; j < ranges.size(); ++j) meets = meets || (i != j && meet(ranges[i], ranges[j]));
    if (meets) found.push_back(i);
  }
  return found;
}

Ranges some_ranges(std::mt19937_64& random, uint64_t most, uint64_t space) {
  Ranges ranges(random() % (most + 1));
  for (MemoryRange& range : ranges) {
    range.start = random() % space;
    range.end = range.start + 1 + random() % (random() % 8 == 0 ? space : 6);
  }
  return ranges;
}

Leaf leaf_at(uint64_t start, uint64_t bytes) {
  Leaf leaf{};
  leaf.start = start;
  leaf.bytes = bytes;
  return leaf;
}

TEST_CASE("leaves: ranges that meet are those that a look at every pair finds") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20'000; ++round) {
    const uint64_t space = 10 + random() % 150;  // crowded, and not
    const Ranges ranges = some_ranges(random, 12, space);
    const Ranges others = some_ranges(random, 4, space);
    const std::vector<uint32_t> want = meeting_pairs(ranges, others);
    REQUIRE(meeting(ranges, others) == want);
    Leaves leaves;
    for (const MemoryRange& range : ranges) leaves.add(leaf_at(range.start, range.end - range.start), {}, "key");
    REQUIRE(leaves.shared(others) == want);
  }
}

TEST_CASE("leaves: ranges that only touch do not meet, and equal ones do") {
  CHECK(meeting(Ranges{{0, 4}, {4, 8}, {8, 9}}, {}).empty());
  CHECK(meeting(Ranges{{4, 8}}, Ranges{{0, 4}, {8, 12}}).empty());
  CHECK(meeting(Ranges{{4, 8}, {4, 8}}, {}) == std::vector<uint32_t>{0, 1});
  CHECK(meeting(Ranges{{4, 8}}, Ranges{{4, 8}}) == std::vector<uint32_t>{0});
  CHECK(meeting(Ranges{{0, 100}, {10, 11}, {50, 51}, {100, 101}}, {}) == std::vector<uint32_t>{0, 1, 2});
  const uint64_t top = ~uint64_t{0};
  CHECK(meeting(Ranges{{top - 4, top}, {top - 1, top}}, {}) == std::vector<uint32_t>{0, 1});
}

std::string some_key(std::mt19937_64& random) {
  static const std::vector<std::string> parts = {
      "model", "/", "layer.", std::string(1, '\0'), "\x7F", "\x80", "\xFF", "0123456789abcdef", "a", ""};
  std::string key = random() % 2 == 0 ? "model/encoder/layers." : "";
  for (uint64_t count = random() % 5; count > 0; --count) key += parts[random() % parts.size()];
  return key;
}

TEST_CASE("leaves: chunks are in the order of the bytes of their whole keys") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 5'000; ++round) {
    std::set<std::string> known;
    const auto fresh = [&] {
      std::string key = some_key(random);
      while (!known.insert(key).second) key += static_cast<char>(random());
      return key;
    };
    Leaves leaves;
    std::vector<uint32_t> shared;
    std::vector<std::string> more;
    std::vector<std::pair<std::string, uint32_t>> want;
    const auto count = static_cast<uint32_t>(random() % 12);
    for (uint32_t number = 0; number < count; ++number) {
      const std::string key = fresh();
      leaves.add(leaf_at(0, 1), {}, key);
      if (random() % 4 == 0) {
        shared.push_back(number);
      } else {
        want.emplace_back(key, number);
      }
    }
    for (uint32_t i = 0; i < random() % 4; ++i) {
      more.push_back(fresh());
      want.emplace_back(more.back(), count + i);
    }
    // std::string compares bytes as unsigned, as UTF-8 is sorted.
    std::ranges::sort(want);
    const ChunkOrder order(leaves, shared, more);
    REQUIRE(order.chunks().size() == want.size());
    CHECK_FALSE(order.twice().has_value());
    for (size_t i = 0; i < want.size(); ++i) CHECK(order.chunks()[i] == want[i].second);
    REQUIRE(order.more().size() == more.size());
    for (size_t i = 0; i < more.size(); ++i) CHECK(want[order.more()[i]].first == more[i]);
  }
}

TEST_CASE("leaves: a key that two chunks have is named") {
  Leaves leaves;
  for (const char* key : {"model/a", "model/b", "model/a"}) leaves.add(leaf_at(0, 1), {}, key);
  CHECK(ChunkOrder(leaves, {}, {}).twice() == "model/a");
  const std::vector<uint32_t> shared = {0};
  CHECK_FALSE(ChunkOrder(leaves, shared, {}).twice().has_value());
  const std::vector<std::string> more = {"model/b"};
  CHECK(ChunkOrder(leaves, shared, more).twice() == "model/b");
  // Keys that differ only in zeros at the end are different ones.
  const std::vector<std::string> zeros = {std::string("k"), std::string("k\0", 2), std::string("k\0\0", 3)};
  const ChunkOrder order(Leaves(), {}, zeros);
  CHECK_FALSE(order.twice().has_value());
  CHECK(order.chunks() == std::vector<uint32_t>{0, 1, 2});
}

TEST_CASE("leaves: alike are those with the same keys, dtypes and shapes, wherever they lie") {
  const auto state = [](uint64_t start, uint8_t dtype, std::vector<int64_t> shape, const char* first,
                        const char* second) {
    Leaves leaves;
    Leaf leaf = leaf_at(start, 24);
    leaf.dtype = dtype;
    leaves.add(leaf, shape, first);
    leaves.add(leaf_at(start + 24, 1), std::vector<int64_t>{1}, second);
    return leaves;
  };
  const Leaves one = state(0, 12, {2, 3}, "ab", "c");
  CHECK(one.alike(state(1000, 12, {2, 3}, "ab", "c")));
  CHECK_FALSE(one.alike(state(0, 13, {2, 3}, "ab", "c")));
  CHECK_FALSE(one.alike(state(0, 12, {3, 2}, "ab", "c")));
  CHECK_FALSE(one.alike(state(0, 12, {6}, "ab", "c")));
  CHECK_FALSE(one.alike(state(0, 12, {2, 3}, "a", "bc")));  // together the same text
  CHECK_FALSE(one.alike(state(0, 12, {2, 3}, "ab", "d")));
  CHECK_FALSE(one.alike(Leaves()));
}

TEST_CASE("leaves: what the document says of a tensor") {
  Leaves leaves;
  Leaf leaf = leaf_at(0, 24);
  leaves.add(leaf, std::vector<int64_t>{2, 3}, "a");
  leaf.marks = mark_conj | mark_neg | mark_parameter | mark_grad;
  leaves.add(leaf, {}, "b");
  std::string text;
  leaves.describe(0, 7, text);
  leaves.describe(1, 18'446'744'073'709'551'615u, text);
  CHECK(text == R"({"chunk":7,"shape":[2,3]})"
                R"({"chunk":18446744073709551615,"shape":[],"conj":true,"neg":true,"kind":"parameter","grad":true})");
}

}  // namespace
}  // namespace tierload
