#include "accelerator/pinned.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>

namespace tierload {
namespace {

constexpr uint64_t least_bytes = 64u << 10;

std::atomic<uint64_t> held{0};
std::atomic<uint64_t> most{0};

void count(uint64_t bytes) {
  const uint64_t now = held += bytes;
  for (uint64_t before = most; before < now && !most.compare_exchange_weak(before, now);) {
  }
}

std::mutex& pools_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::vector<PinnedPool*>& pools() {
  static auto* const all = new std::vector<PinnedPool*>;
  return *all;
}

}  // namespace

class PinnedPool::Block : public PinnedMemory {
 public:
  Block(PinnedPool& pool, std::byte* at, uint64_t bytes) : pool_(pool), at_(at), bytes_(bytes) {}
  // A forked child has no right to it: the memory is the parent's.
  ~Block() override {
    if (owner_ == ::getpid()) pool_.give(at_, bytes_);
  }
  MutableBytes memory() const override { return {at_, bytes_}; }

 private:
  PinnedPool& pool_;
  std::byte* const at_;
  const uint64_t bytes_;
  const int owner_ = ::getpid();
};

PinnedPool::PinnedPool(std::function<std::byte*(uint64_t)> allocate, std::function<void(std::byte*)> release)
    : allocate_(std::move(allocate)), release_(std::move(release)) {
  const std::lock_guard guard(pools_mutex());
  pools().push_back(this);
}

std::unique_ptr<PinnedMemory> PinnedPool::take(uint64_t bytes) {
  const uint64_t size = std::bit_ceil(std::max(bytes, least_bytes));
  {
    const std::lock_guard guard(mutex_);
    const auto found = idle_.find(size);
    if (found != idle_.end()) {
      std::byte* const at = found->second;
      idle_.erase(found);
      return std::make_unique<Block>(*this, at, size);
    }
  }
  std::byte* const at = allocate_(size);
  count(size);
  return std::make_unique<Block>(*this, at, size);
}

void PinnedPool::give(std::byte* at, uint64_t bytes) {
  const std::lock_guard guard(mutex_);
  idle_.emplace(bytes, at);
}

void PinnedPool::trim() {
  std::multimap<uint64_t, std::byte*> idle;
  {
    const std::lock_guard guard(mutex_);
    idle.swap(idle_);
  }
  for (const auto& [bytes, at] : idle) {
    release_(at);
    held -= bytes;
  }
}

PinnedUse pinned_use() { return {held, most}; }

void trim_pinned() {
  const std::lock_guard guard(pools_mutex());
  for (PinnedPool* pool : pools()) pool->trim();
}

}  // namespace tierload
