// What pages are, without a look at the store: ranks compare their states by it.
#include <algorithm>
#include <atomic>
#include <future>

#include "engine/page_bytes.h"
#include "tierload/engine.h"

namespace tierload {

std::vector<Digest> digest_pages(std::span<const PageSource> sources, unsigned threads) {
  std::vector<Digest> digests(sources.size());
  const std::vector<std::optional<Digest>> there = device_digests(sources);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    PageBytes bytes;
    Lanes lanes;
    for (size_t page = next++; page < sources.size(); page = next++) {
      digests[page] = there[page] ? *there[page] : tree_digest(bytes.of(sources[page], lanes), page_leaf);
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
