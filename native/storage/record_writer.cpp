// Small records made durable in each of the ways that Linux has for it: `tierload bench wal`.
#include <fcntl.h>
#include <liburing.h>
#include <sys/uio.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "storage/posix_tree.h"
#include "tierload/bytes.h"
#include "tierload/device.h"

namespace tierload {
namespace posix {
namespace {

using Clock = std::chrono::steady_clock;

// The record's memory and its file, which both ways to write share.
class Target : public RecordWriter {
 public:
  Target(const std::string& path, const RecordWay& way, uint64_t record_bytes, uint64_t records)
      : path_(path),
        way_(way),
        step_(way.direct ? round_up(record_bytes, sector) : record_bytes),
        end_(step_ * (records + 1)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(sector, round_up(step_, sector)))) {
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_.get(), 0, step_);
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    {  // the zeros go through the page cache, whichever way the records take
      const Fd file(retry([&] { return ::open(path.c_str(), flags, 0600); }));
      if (!file.valid()) fail("open", path, errno);
      if (!way.grows) fill(file.get());
      if (::fsync(file.get()) != 0) fail("fsync", path, errno);
    }
    fd_ = Fd(retry([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC | (way.direct ? O_DIRECT : 0)); }));
    if (!fd_.valid()) fail(way.direct ? "open with O_DIRECT" : "open", path, errno);
  }

  std::vector<uint64_t> write(uint64_t count) override {
    if (count > (end_ - offset_) / step_) throw UsageError("more records than were announced");
    std::vector<uint64_t> times;
    times.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      std::memcpy(memory_.get(), &offset_, sizeof offset_);  // no two records are equal
      const auto start = Clock::now();
      put(offset_);
      const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
      times.push_back(static_cast<uint64_t>(taken.count()));
      offset_ += step_;
    }
    return times;
  }

 protected:
  // One record at `offset`.
  virtual void put(uint64_t offset) = 0;

  const std::string& path() const { return path_; }
  const RecordWay& way() const { return way_; }
  int fd() const { return fd_.get(); }
  iovec record() const { return {memory_.get(), step_}; }
  int write_flags() const { return way_.flush == RecordWay::Flush::with ? RWF_DSYNC : 0; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  void fill(int fd) const {
    const std::vector<std::byte> zeros(end_);
    for (uint64_t at = 0; at < end_;) {
      const ssize_t put = retry([&] { return ::pwrite(fd, zeros.data() + at, end_ - at, static_cast<off_t>(at)); });
      if (put < 0) fail("write", path_, errno);
      at += static_cast<uint64_t>(put);
    }
  }

  const std::string path_;
  const RecordWay way_;
  const uint64_t step_;
  const uint64_t end_;
  uint64_t offset_ = 0;
  std::unique_ptr<std::byte, Free> memory_;
  Fd fd_;
};

class CallWriter : public Target {
 public:
  using Target::Target;

 private:
  void put(uint64_t offset) override {
    const iovec part = record();
    const auto written = retry([&] { return ::pwritev2(fd(), &part, 1, static_cast<off_t>(offset), write_flags()); });
    if (written < 0) fail("write", path(), errno);
    if (static_cast<size_t>(written) != part.iov_len) fail("write", path(), EIO);
    if (way().flush == RecordWay::Flush::after && ::fdatasync(fd()) != 0) fail("fdatasync", path(), errno);
  }
};

class RingWriter : public Target {
 public:
  RingWriter(const std::string& file, const RecordWay& way, uint64_t record_bytes, uint64_t records)
      : Target(file, way, record_bytes, records) {
    check("io_uring_setup", io_uring_queue_init(2, &ring_.raw, 0));
    ring_.made = true;
    const iovec part = record();
    const int number = fd();
    check("register memory with io_uring", io_uring_register_buffers(&ring_.raw, &part, 1));
    check("register a file with io_uring", io_uring_register_files(&ring_.raw, &number, 1));
  }

 private:
  struct Raw {
    io_uring raw{};
    bool made = false;
    ~Raw() {
      if (made) io_uring_queue_exit(&raw);
    }
  };

  void check(const char* op, int code) const {
    if (code < 0) fail(op, path(), -code);
  }

  void put(uint64_t offset) override {
    const iovec part = record();
    const bool linked = way().flush == RecordWay::Flush::after;
    io_uring_sqe* entry = io_uring_get_sqe(&ring_.raw);
    io_uring_prep_write_fixed(entry, 0, part.iov_base, static_cast<unsigned>(part.iov_len), offset, 0);
    entry->rw_flags = write_flags();
    io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE | (linked ? IOSQE_IO_LINK : 0u));
    if (linked) {
      entry = io_uring_get_sqe(&ring_.raw);
      io_uring_prep_fsync(entry, 0, IORING_FSYNC_DATASYNC);
      io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
    }
    const unsigned entries = linked ? 2 : 1;
    check("submit to io_uring", retry_ring([&] { return io_uring_submit_and_wait(&ring_.raw, entries); }));
    // A write that stopped short breaks the link: the flush is then -ECANCELED.
    for (unsigned i = 0; i < entries; ++i) {
      io_uring_cqe* done = nullptr;
      check("wait for io_uring", retry_ring([&] { return io_uring_wait_cqe(&ring_.raw, &done); }));
      const int result = done->res;
      io_uring_cqe_seen(&ring_.raw, done);
      check(i == 0 ? "write with io_uring" : "fsync with io_uring", result);
    }
  }

  template <typename Call>
  static int retry_ring(Call call) {
    int code = call();
    while (code == -EINTR) code = call();
    return code;
  }

  Raw ring_;
};

}  // namespace
}  // namespace posix

std::unique_ptr<RecordWriter> record_writer(const std::string& path, const RecordWay& way, uint64_t record_bytes,
                                            uint64_t records) {
  if (record_bytes < sizeof(uint64_t)) throw UsageError("a record has 8 bytes at least");
  std::unique_ptr<RecordWriter> writer;
  if (way.ring) {
    writer = std::make_unique<posix::RingWriter>(path, way, record_bytes, records);
  } else {
    writer = std::make_unique<posix::CallWriter>(path, way, record_bytes, records);
  }
  writer->write(1);
  return writer;
}

}  // namespace tierload
