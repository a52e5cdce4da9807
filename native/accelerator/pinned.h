// Pinned memory in blocks that are used again: to pin takes as long as to copy a hundred times as much.
#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "tierload/accelerator.h"

namespace tierload {

// Lives as long as the process.
class PinnedPool {
 public:
  // `allocate` throws; `release` does not.
  PinnedPool(std::function<std::byte*(uint64_t)> allocate, std::function<void(std::byte*)> release);
  // At least so many bytes, on whole pages of memory.
  std::unique_ptr<PinnedMemory> take(uint64_t bytes);
  // Idle blocks go back to the system.
  void trim();

 private:
  class Block;
  void give(std::byte* at, uint64_t bytes);

  const std::function<std::byte*(uint64_t)> allocate_;
  const std::function<void(std::byte*)> release_;
  std::mutex mutex_;
  std::multimap<uint64_t, std::byte*> idle_;  // by size
};

}  // namespace tierload
