// Many short copies at once, for what others have read into memory that is shared with them.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>

#include "tierload/engine.h"

namespace tierload {
namespace {

constexpr size_t block_most = 4096;         // runs that a thread takes at a time
constexpr uint64_t alone_bytes = 1u << 20;  // less is copied sooner than a thread begins

}  // namespace

void copy_runs(std::span<const CopyRun> runs, unsigned threads) {
  uint64_t total = 0;
  for (const CopyRun& run : runs) total += run.length;
  const size_t helpers = total < alone_bytes ? 0 : std::min<size_t>(threads, runs.size());
  const size_t block = std::clamp<size_t>(runs.size() / (8 * (helpers + 1)), 1, block_most);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t begin = next.fetch_add(block); begin < runs.size(); begin = next.fetch_add(block)) {
      for (const CopyRun& run : runs.subspan(begin, std::min(block, runs.size() - begin))) {
        std::memcpy(run.to, run.from, run.length);
      }
    }
  };
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < helpers; ++i) others.push_back(std::async(work));  // where no thread can be had, get() works
  work();
  for (auto& other : others) other.get();
}

}  // namespace tierload
