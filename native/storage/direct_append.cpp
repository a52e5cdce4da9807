// Writing a segment past the page cache: copied into aligned buffers, several of which are on their way to the device.
#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "storage/direct.h"
#include "tierload/bytes.h"

namespace tierload::posix {
namespace {

class DirectAppender : public Appender {
 public:
  DirectAppender(RingLoan ring, Fd fd, std::string shown, uint64_t expected)
      : ring_(std::move(ring)), fd_(std::move(fd)), shown_(std::move(shown)), file_bytes_(round_up(expected, sector)) {
    // A file that has its size from the start takes writes side by side; one that grows takes them one by one. A disk
    // that is too full for the guess may still have room for the bytes.
    if (retry([&] { return ::fallocate(fd_.get(), 0, 0, static_cast<off_t>(file_bytes_)); }) != 0) file_bytes_ = 0;
    ring_->set_file(0, fd_.get());
    for (uint32_t i = 0; i < ring_->buffers(); ++i) free_.push_back(i);
    lengths_.resize(ring_->buffers());
    offsets_.resize(ring_->buffers());
  }

  ~DirectAppender() override {
    // The kernel still reads from the buffers and holds the file.
    while (ring_->under_way() > 0) {
      ring_->wait();
      ring_->take();
    }
    ring_->set_file(0, -1);
  }

  void skip(uint64_t /*bytes*/) override {
    throw UsageError("what goes past the page cache in whole blocks leaves nothing out");
  }

  void append(std::span<const Bytes> parts) override {
    for (Bytes part : parts) {
      while (!part.empty()) {
        const MutableBytes room = ring_->buffer(current()).subspan(filled_);
        const size_t length = std::min(part.size(), room.size());
        std::memcpy(room.data(), part.data(), length);
        part = part.subspan(length);
        filled_ += length;
        if (filled_ == ring_->buffer_bytes()) send();
      }
    }
  }

  void finish() override {
    if (filled_ > 0) send();
    while (ring_->under_way() > 0) settle();
    if (file_bytes_ > offset_ && retry([&] { return ::ftruncate(fd_.get(), static_cast<off_t>(offset_)); }) != 0) {
      fail("truncate", shown_, errno);
    }
  }

 private:
  // The buffer that is being filled.
  uint32_t current() {
    while (free_.empty()) settle();
    return free_.back();
  }

  void send() {
    const uint32_t buffer = current();
    free_.pop_back();
    lengths_[buffer] = filled_;
    offsets_[buffer] = offset_;
    ring_->write(0, buffer, offset_, filled_);
    offset_ += filled_;
    filled_ = 0;
  }

  // Waits for one transfer.
  void settle() {
    ring_->wait();
    const auto done = ring_->take();
    if (!done) return;
    const uint32_t buffer = done->buffer;
    if (done->result < 0) fail("write", shown_, static_cast<int>(-done->result));
    // The file system stopped short, as it does before the disk is full: the rest by itself says why.
    for (uint64_t put = static_cast<uint64_t>(done->result); put < lengths_[buffer];) {
      const Bytes rest = Bytes(ring_->buffer(buffer)).subspan(put, lengths_[buffer] - put);
      const off_t at = static_cast<off_t>(offsets_[buffer] + put);
      const ssize_t more = retry([&] { return ::pwrite(fd_.get(), rest.data(), rest.size(), at); });
      if (more < 0) fail("write", shown_, errno);
      if (more == 0) fail("write", shown_, EIO);
      put += static_cast<uint64_t>(more);
    }
    free_.push_back(buffer);
  }

  const RingLoan ring_;
  const Fd fd_;
  const std::string shown_;
  uint64_t file_bytes_;  // what the file was given in advance
  uint64_t offset_ = 0;  // where the buffer that is being filled will go
  uint64_t filled_ = 0;
  std::vector<uint32_t> free_;
  std::vector<uint64_t> lengths_;
  std::vector<uint64_t> offsets_;
};

}  // namespace

std::unique_ptr<Appender> direct_appender(RingLoan ring, Fd fd, std::string shown, uint64_t expected) {
  return std::make_unique<DirectAppender>(std::move(ring), std::move(fd), std::move(shown), expected);
}

}  // namespace tierload::posix
