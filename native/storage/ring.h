// One io_uring with buffers of its own, registered once. Not safe for several threads, except where it says so.
#pragma once

#include <liburing.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tierload/storage.h"

namespace tierload::posix {

class Ring {
 public:
  static constexpr uint32_t files_max = 64;

  // Moves as many buffers at a time as there are. Throws UnsupportedError where the kernel or a sandbox refuses.
  Ring(uint32_t buffers, uint64_t buffer_bytes);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring();

  uint32_t buffers() const { return static_cast<uint32_t>(memory_.size()); }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  MutableBytes buffer(uint32_t number) const { return {memory_[number], buffer_bytes_}; }

  // Registers a file under a number below files_max, or takes it out with -1.
  void set_file(uint32_t number, int fd);

  // Starts a transfer between a file that was set and the first `length` bytes of a buffer.
  void write(uint32_t file, uint32_t buffer, uint64_t offset, uint64_t length);
  void read(uint32_t file, uint32_t buffer, uint64_t offset, uint64_t length);

  struct Done {
    uint32_t buffer = 0;
    int64_t result = 0;  // bytes, or -errno
  };
  // A transfer that is done, if there is one.
  std::optional<Done> take();
  // Waits until take() has something. Another thread may start transfers meanwhile, but none may take.
  void wait();
  uint32_t under_way() const { return under_way_; }
  // Bytes moved since it was last asked.
  uint64_t take_moved() { return std::exchange(moved_, 0); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  void start(bool writes, uint32_t file, uint32_t buffer, uint64_t offset, uint64_t length);

  const uint64_t buffer_bytes_;
  std::unique_ptr<std::byte, Free> block_;
  std::vector<std::byte*> memory_;
  std::vector<int> files_;
  bool buffers_registered_ = false;  // a low memlock limit refuses it: they then work like any other memory
  bool files_registered_ = false;
  uint32_t under_way_ = 0;
  uint64_t moved_ = 0;
  io_uring ring_{};
};

}  // namespace tierload::posix
