// Split and merge of byte planes in GB/s of raw bytes, every instruction set that this processor has, against memcpy.
// `planes [page bytes]`: one page again and again (default 1 MiB, as in a store); the median of many short runs, taken
// in turn.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "codec/plane_kernels.h"

namespace {

using namespace tierload;
using Clock = std::chrono::steady_clock;

constexpr int rounds = 41;
constexpr int calls = 20;

struct Task {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds;
};

std::span<const PlaneKernel* const> kernels() {
  size_t count = 0;
  const PlaneKernel* const* const here = plane_kernels_here(&count);
  return {here, count};
}

double gigabytes_per_second(size_t bytes, Task& task) {
  const auto middle = task.seconds.begin() + rounds / 2;
  std::nth_element(task.seconds.begin(), middle, task.seconds.end());
  return static_cast<double>(bytes) * calls / *middle / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  const size_t bytes = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : size_t{1} << 20;
  // Tensors are aligned, and so are the planes of a page that is split; those of a stored page lie behind its header.
  constexpr size_t alignment = 64;
  constexpr size_t header = 100;
  std::vector<unsigned char> memory(2 * bytes + 2 * alignment + header, 1);
  unsigned char* const raw = memory.data() + (alignment - reinterpret_cast<uintptr_t>(memory.data()) % alignment);
  unsigned char* const split = raw + bytes;
  std::vector<Task> tasks = {{"memcpy", [=] { std::memcpy(split, raw, bytes); }, {}}};
  for (const size_t item_size : {size_t{2}, size_t{4}, size_t{8}}) {
    std::array<unsigned char*, 8> planes{};
    std::array<unsigned char*, 8> stored{};
    for (size_t p = 0; p < item_size; ++p) {
      planes[p] = split + p * (bytes / item_size);
      stored[p] = planes[p] + header;
    }
    for (const bool rotate : {false, true}) {
      for (const PlaneKernel* const kernel_at : kernels()) {
        const PlaneKernel& kernel = *kernel_at;
        const std::string name = std::to_string(item_size) + (rotate ? " bytes, rotated, " : " bytes, ") + kernel.name;
        tasks.push_back(
            {"split " + name,
             [=, &kernel] { split_items(kernel, raw, bytes / item_size, item_size, rotate, planes.data()); },
             {}});
        tasks.push_back(
            {"merge " + name,
             [=, &kernel] { merge_items(kernel, stored.data(), bytes / item_size, item_size, rotate, raw); },
             {}});
      }
    }
  }
  for (int round = 0; round < rounds; ++round) {
    for (Task& task : tasks) {
      task.run();  // its planes come into the cache
      const auto start = Clock::now();
      for (int call = 0; call < calls; ++call) task.run();
      task.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
  }
  for (Task& task : tasks) std::printf("%-36s %6.2f GB/s\n", task.name.c_str(), gigabytes_per_second(bytes, task));
}
