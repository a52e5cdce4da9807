// The parts of the storage that moves data past the page cache.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "storage/posix_tree.h"
#include "storage/ring.h"
#include "tierload/storage.h"

namespace tierload::posix {

using RingLoan = std::unique_ptr<Ring, std::function<void(Ring*)>>;

// A ring, kept for its next use when it is small: to register its memory takes longer than a small transfer.
class RingPool : public std::enable_shared_from_this<RingPool> {
 public:
  // Null when the kernel has none to give just now.
  RingLoan borrow(uint32_t buffers, uint64_t buffer_bytes);
  // Bytes that rings have moved until they were given back.
  uint64_t moved() const { return moved_; }

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> moved_{0};
  std::vector<std::unique_ptr<Ring>> idle_;
};

// A file, with `flags` and O_DIRECT; not valid, and errno is set, when it does not open.
Fd open_direct(Tree& tree, const std::string& path, int flags);

// Throws UnsupportedError, with a reason for a person, when files below `tree` cannot be moved past the page cache.
void check_direct(Tree& tree);

// `fd` is open for writing with O_DIRECT, on a file that is empty.
std::unique_ptr<Appender> direct_appender(RingLoan ring, Fd fd, std::string shown, uint64_t expected);

// How many of the bytes are in the page cache.
uint64_t cached_bytes(Tree& tree, const std::vector<std::string>& files, const std::vector<Fetch::Range>& ranges);

// Every buffer of the ring holds the largest range, widened to whole blocks. `plain` outlives the fetch.
std::unique_ptr<Fetch> direct_fetch(RingLoan ring, Storage& plain, std::shared_ptr<Tree> tree,
                                    std::vector<std::string> files, std::vector<Fetch::Range> ranges,
                                    FetchOrder* order);

// Where `range` lies when it is widened to whole blocks.
uint64_t block_start(const Fetch::Range& range);
uint64_t block_bytes(const Fetch::Range& range);

}  // namespace tierload::posix
