#include "engine/gather.h"

#include <doctest/doctest.h>

#include <random>

#include "tierload/error.h"

namespace tierload {
namespace {

// Element by element, in the plainest way.
std::vector<std::byte> packed(uint64_t item, const std::vector<uint64_t>& counts, const std::vector<int64_t>& strides,
                              const std::byte* base) {
  std::vector<std::byte> out;
  std::vector<uint64_t> at(counts.size(), 0);
  while (true) {
    const std::byte* element = base;
    for (size_t d = 0; d < at.size(); ++d) element += static_cast<int64_t>(at[d]) * strides[d];
    out.insert(out.end(), element, element + item);
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == counts[d - 1]) at[--d] = 0;
    if (d == 0) return out;
  }
}

TEST_CASE("gather: any part of any view equals its packed elements") {
  std::mt19937_64 random(7);
  std::vector<std::byte> memory(1 << 16);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 2000; ++round) {
    const uint64_t item = std::vector<uint64_t>{1, 2, 3, 4, 8, 16}[random() % 6];
    std::vector<uint64_t> counts(random() % 5);
    std::vector<int64_t> strides(counts.size());
    for (size_t d = 0; d < counts.size(); ++d) {
      counts[d] = 1 + random() % 6;
      strides[d] = static_cast<int64_t>(item * (random() % 40)) * (random() % 4 == 0 ? -1 : 1);
    }
    for (size_t d = counts.size(); d-- > 1;) {  // often, dimensions continue each other
      if (random() % 2 == 0) strides[d - 1] = strides[d] * static_cast<int64_t>(counts[d]);
    }
    if (!strides.empty() && random() % 2 == 0) strides.back() = static_cast<int64_t>(item);
    int64_t reach = 0;
    for (size_t d = 0; d < counts.size(); ++d) reach += std::abs(strides[d]) * static_cast<int64_t>(counts[d]);
    if (reach >= (1 << 15)) continue;
    const std::byte* base = memory.data() + (1 << 15);
    const std::vector<std::byte> want = packed(item, counts, strides, base);
    const StridedView view(item, counts, strides);
    REQUIRE(view.bytes() == want.size());
    const uint64_t items = want.size() / item;
    const uint64_t first = random() % items;
    const uint64_t length = 1 + random() % (items - first);
    std::vector<std::byte> got(length * item);
    gather(view, base, first * item, got);
    CHECK(std::equal(got.begin(), got.end(), want.begin() + static_cast<ptrdiff_t>(first * item)));
  }
}

TEST_CASE("gather: a view without elements is refused") {
  const std::vector<uint64_t> counts = {2, 0};
  const std::vector<int64_t> strides = {4, 4};
  CHECK_THROWS_AS(StridedView(4, counts, strides), UsageError);
  CHECK_THROWS_AS(StridedView(4, std::span(counts).first(1), strides), UsageError);
}

}  // namespace
}  // namespace tierload
