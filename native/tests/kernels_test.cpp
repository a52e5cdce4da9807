// The kernels on the processor: a thread for each of a block's, which meet where theirs exchange values.
#include <doctest/doctest.h>

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "accelerator/tiles.h"
#include "tierload/digest.h"

namespace kernels {

#include "accelerator/tile.h"

struct Index {
  unsigned x = 0;
};
thread_local Index threadIdx;
Index blockIdx, blockDim;

// Threads of a warp that exchange values: eight here, and all of them or none come.
struct Group {
  std::barrier<> meets{8};
  unsigned long long values[8] = {};
};
std::vector<std::unique_ptr<Group>> groups;

unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, int other) {
  Group& group = *groups[threadIdx.x / 8];
  const int lane = static_cast<int>(threadIdx.x % 8);
  group.values[lane] = value;
  group.meets.arrive_and_wait();
  const unsigned long long found = group.values[lane ^ other];
  group.meets.arrive_and_wait();
  return found;
}

unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<Wide>(a) * b >> 64);
}

std::unique_ptr<std::barrier<>> block;
void __syncthreads() { block->arrive_and_wait(); }

#define __device__
#define __global__
#define __shared__ static
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wcast-align"
#include "accelerator/copy.cu"
#include "accelerator/digest.cu"
#pragma GCC diagnostic pop

void run(void (*kernel)(const Tile*), const std::vector<tierload::Tile>& tiles, unsigned count) {
  std::vector<Tile> copies;
  for (const tierload::Tile& tile : tiles) copies.push_back({tile.from, tile.into, tile.length});
  groups.clear();
  for (unsigned i = 0; i < (count + 7) / 8; ++i) groups.push_back(std::make_unique<Group>());
  blockDim.x = count;
  block = std::make_unique<std::barrier<>>(count);
  for (blockIdx.x = 0; blockIdx.x < tiles.size(); ++blockIdx.x) {
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        threadIdx.x = i;
        kernel(copies.data());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace kernels

using namespace tierload;

namespace {

std::vector<std::byte> noise(size_t size) {
  std::mt19937_64 random(size);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

uint64_t address(const std::byte* at) { return reinterpret_cast<uint64_t>(at); }

}  // namespace

TEST_CASE("the digests of an accelerator's leaves are those of the processor's") {
  std::vector<size_t> lengths{1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 143, 144, 239, 240};
  for (const size_t more : {241, 256, 257, 320, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 5000})
    lengths.push_back(more);
  for (const size_t length : lengths) {
    for (const size_t shift : {size_t{0}, size_t{3}}) {
      const auto bytes = noise(length + 16);
      const std::byte* const at = bytes.data() + shift;
      uint64_t leaf = 0;
      kernels::run(kernels::tierload_digest, digest_tiles(std::vector{DeviceRun{address(at), length}}, &leaf), 8);
      CAPTURE(length);
      CAPTURE(shift);
      CHECK(leaf == xxh3({at, length}));
    }
  }
}

TEST_CASE("the runs of a digest are cut at leaves, and each leaf has its place") {
  const auto bytes = noise(2 * page_leaf + 100);
  std::vector<uint64_t> leaves(4);
  const std::vector<DeviceRun> runs{{address(bytes.data()), bytes.size()}, {address(bytes.data()) + 8, 16}};
  kernels::run(kernels::tierload_digest, digest_tiles(runs, leaves.data()), 24);
  CHECK(tree_root(std::span(leaves).first(3), bytes.size()) == tree_digest(bytes, page_leaf));
  CHECK(leaves[3] == xxh3(Bytes(bytes).subspan(8, 16)));
  CHECK(digest_tiles(std::vector{DeviceRun{0, 33 * page_leaf}}, nullptr).size() == 2);
}

TEST_CASE("copies arrive whole, whatever their alignment") {
  const auto from = noise(600'000);
  std::vector<std::byte> into(from.size() + 64);
  std::vector<DeviceCopy> copies;
  uint64_t at = 0;
  for (const uint64_t length : {1ull, 3ull, 16ull, 4096ull, 524'288ull, 70'000ull, 12ull, 6ull}) {
    copies.push_back({address(from.data()) + at, address(into.data()) + at + (at % 2 ? 5 : 16), length});
    at += length;
  }
  kernels::run(kernels::tierload_copy, copy_tiles(copies), 8);
  for (const DeviceCopy& copy : copies) {
    const Bytes wanted(reinterpret_cast<const std::byte*>(copy.from), copy.length);
    CHECK(std::ranges::equal(wanted, Bytes(reinterpret_cast<const std::byte*>(copy.into), copy.length)));
  }
}
