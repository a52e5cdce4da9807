// What pages are, without a look at the store: ranks compare their states by it.
#include <algorithm>
#include <atomic>
#include <future>

#include "engine/gather.h"
#include "tierload/engine.h"

namespace tierload {

std::vector<Digest> digest_pages(std::span<const PageSource> sources, unsigned threads) {
  std::vector<Digest> digests(sources.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    std::vector<std::byte> gathered;
    for (size_t page = next++; page < sources.size(); page = next++) {
      digests[page] = tree_digest(raw_bytes(sources[page], gathered), page_leaf);
    }
  };
  const size_t helpers = std::min<size_t>(threads, sources.size());
  std::vector<std::future<void>> others;
  for (size_t i = 0; i < helpers; ++i) others.push_back(std::async(work));  // where no thread can be had, get() works
  work();
  for (auto& other : others) other.get();
  return digests;
}

}  // namespace tierload
