#include "storage/ring.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#include "tierload/bytes.h"

namespace tierload::posix {

Ring::Ring(uint32_t buffers, uint64_t buffer_bytes) : buffer_bytes_(buffer_bytes), files_(files_max, -1) {
  block_.reset(static_cast<std::byte*>(std::aligned_alloc(sector, buffers * buffer_bytes)));
  if (!block_) throw std::bad_alloc();
  const int code = io_uring_queue_init(buffers, &ring_, 0);
  if (code < 0) throw UnsupportedError(std::string("io_uring is refused: ") + std::strerror(-code));
  std::vector<iovec> vectors;
  for (uint32_t i = 0; i < buffers; ++i) {
    memory_.push_back(block_.get() + i * buffer_bytes);
    vectors.push_back({memory_.back(), buffer_bytes});
  }
  buffers_registered_ = io_uring_register_buffers(&ring_, vectors.data(), buffers) == 0;
  files_registered_ = io_uring_register_files(&ring_, files_.data(), files_max) == 0;
}

Ring::~Ring() {
  // The kernel uses the buffers until the last transfer is done.
  while (under_way_ > 0) {
    wait();
    take();
  }
  io_uring_queue_exit(&ring_);
}

void Ring::set_file(uint32_t number, int fd) {
  files_[number] = fd;
  if (files_registered_ && io_uring_register_files_update(&ring_, number, &fd, 1) < 0) files_registered_ = false;
}

void Ring::write(uint32_t file, uint32_t buffer, uint64_t offset, uint64_t length) {
  start(true, file, buffer, offset, length);
}

void Ring::read(uint32_t file, uint32_t buffer, uint64_t offset, uint64_t length) {
  start(false, file, buffer, offset, length);
}

void Ring::start(bool writes, uint32_t file, uint32_t buffer, uint64_t offset, uint64_t length) {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);  // there is one for each buffer
  const int fd = files_registered_ ? static_cast<int>(file) : files_[file];
  std::byte* const memory = memory_[buffer];
  const auto size = static_cast<unsigned>(length);
  const auto index = static_cast<int>(buffer);
  if (writes && buffers_registered_) {
    io_uring_prep_write_fixed(entry, fd, memory, size, offset, index);
  } else if (writes) {
    io_uring_prep_write(entry, fd, memory, size, offset);
  } else if (buffers_registered_) {
    io_uring_prep_read_fixed(entry, fd, memory, size, offset, index);
  } else {
    io_uring_prep_read(entry, fd, memory, size, offset);
  }
  if (files_registered_) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data64(entry, buffer);
  int code = io_uring_submit(&ring_);
  while (code == -EINTR || code == -EAGAIN) code = io_uring_submit(&ring_);
  if (code < 0) throw IoError(writes ? "write" : "read", "io_uring", -code);
  ++under_way_;
}

std::optional<Ring::Done> Ring::take() {
  io_uring_cqe* entry = nullptr;
  if (under_way_ == 0 || io_uring_peek_cqe(&ring_, &entry) != 0) return std::nullopt;
  const Done done{static_cast<uint32_t>(io_uring_cqe_get_data64(entry)), entry->res};
  io_uring_cqe_seen(&ring_, entry);
  --under_way_;
  if (done.result > 0) moved_ += static_cast<uint64_t>(done.result);
  return done;
}

void Ring::wait() {
  io_uring_cqe* entry = nullptr;
  int code = io_uring_wait_cqe(&ring_, &entry);
  while (code == -EINTR) code = io_uring_wait_cqe(&ring_, &entry);
  if (code < 0) throw IoError("wait", "io_uring", -code);
}

}  // namespace tierload::posix
