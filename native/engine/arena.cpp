#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "tierload/bytes.h"
#include "tierload/staging.h"

namespace tierload {
namespace {

constexpr uint64_t page_of_memory = 4096;
constexpr uint64_t step_bytes = 4u << 20;  // of a thread that touches pages

}  // namespace

Arena::Arena(uint64_t bytes) : bytes_(round_up(std::max<uint64_t>(bytes, 1), page_of_memory)), owner_(::getpid()) {
  void* found = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(found);
  ::madvise(memory_, bytes_, MADV_DONTFORK);
}

Arena::~Arena() {
  // In a forked child there may be something else at these addresses by now.
  if (owner_ == ::getpid()) ::munmap(memory_, bytes_);
}

void Arena::prefault(unsigned threads) {
  std::atomic<uint64_t> next{0};
  const auto touch = [&] {
    for (uint64_t at = next.fetch_add(step_bytes); at < bytes_; at = next.fetch_add(step_bytes)) {
      const uint64_t length = std::min(step_bytes, bytes_ - at);
#ifdef MADV_POPULATE_WRITE
      if (::madvise(memory_ + at, length, MADV_POPULATE_WRITE) == 0) continue;
#endif
      // Before Linux 5.14: an atomic addition of nothing touches a page that somebody may be writing to.
      for (uint64_t page = at; page < at + length; page += page_of_memory) {
        __atomic_fetch_add(reinterpret_cast<unsigned char*>(memory_ + page), 0, __ATOMIC_RELAXED);
      }
    }
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(touch);
  touch();
  for (std::thread& other : others) other.join();
}

}  // namespace tierload
