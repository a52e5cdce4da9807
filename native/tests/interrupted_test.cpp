// What the posix storage makes of system calls that are interrupted, do half, or do nothing. The definitions below
// stand before those of the C library for this whole program; they pass everything on while no test has armed them.
#include <doctest/doctest.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tierload/error.h"
#include "tierload/storage.h"

using namespace tierload;

namespace {

enum class Trouble { none, interrupt, shorten, nothing };
std::atomic<Trouble> trouble = Trouble::none;
std::atomic<int> calls = 0;
constexpr size_t most = 1000;  // bytes that a shortened call moves

// True for every second call, so that a call that is repeated gets through.
bool hits(Trouble kind) { return trouble == kind && calls++ % 2 == 0; }

ssize_t interrupted() {
  errno = EINTR;
  return -1;
}

}  // namespace

extern "C" {

ssize_t pwritev(int fd, const iovec* parts, int count, off_t offset) {
  if (hits(Trouble::interrupt)) return interrupted();
  if (trouble == Trouble::nothing) return 0;
  if (trouble != Trouble::shorten) return ::syscall(SYS_pwritev, fd, parts, count, offset, 0L);
  ++calls;
  std::vector<iovec> some;
  size_t left = most;
  for (int i = 0; i < count && left > 0; ++i) {
    some.push_back({parts[i].iov_base, std::min(parts[i].iov_len, left)});
    left -= some.back().iov_len;
  }
  return ::syscall(SYS_pwritev, fd, some.data(), some.size(), offset, 0L);
}

ssize_t pread(int fd, void* into, size_t length, off_t offset) {
  if (hits(Trouble::interrupt)) return interrupted();
  return ::syscall(SYS_pread64, fd, into, trouble == Trouble::shorten ? std::min(length, most) : length, offset);
}

int fdatasync(int fd) {
  if (hits(Trouble::interrupt)) return static_cast<int>(interrupted());
  return static_cast<int>(::syscall(SYS_fdatasync, fd));
}

int ftruncate(int fd, off_t length) noexcept {
  if (hits(Trouble::interrupt)) return static_cast<int>(interrupted());
  return static_cast<int>(::syscall(SYS_ftruncate, fd, length));
}
}

namespace {

class Fixture {
 public:
  Fixture() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tierload-interrupted-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
    file = posix_storage(path_)->open("file", OpenMode::create);
    for (size_t i = 0; i < 3000; ++i) texts_.push_back(std::string(i % 23, static_cast<char>('a' + i % 26)));
    texts_.push_back(std::string(5000, 'z'));
    texts_.push_back("the end");
    for (const std::string& text : texts_) {
      parts.push_back(std::as_bytes(std::span(text)));
      all += text;
    }
    calls = 0;
  }
  ~Fixture() {
    trouble = Trouble::none;
    std::filesystem::remove_all(path_);
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  std::string read() {
    std::string text(all.size() + 10, '?');
    text.resize(file->read(0, std::as_writable_bytes(std::span(text))));
    return text;
  }

  std::unique_ptr<File> file;
  std::vector<Bytes> parts;
  std::string all;

 private:
  std::string path_;
  std::vector<std::string> texts_;
};

}  // namespace

TEST_CASE("posix: interrupted calls are repeated") {
  Fixture fixture;
  trouble = Trouble::interrupt;
  fixture.file->write(0, fixture.parts);
  CHECK(fixture.read() == fixture.all);
  fixture.file->sync();
  fixture.file->truncate(3);
  CHECK(fixture.file->size() == 3);
  CHECK(calls >= 8);
}

TEST_CASE("posix: short calls are continued") {
  Fixture fixture;
  trouble = Trouble::shorten;
  fixture.file->write(0, fixture.parts);
  CHECK(fixture.read() == fixture.all);
  CHECK(calls > static_cast<int>(fixture.all.size() / most));
}

TEST_CASE("posix: a write that writes nothing is an error") {
  Fixture fixture;
  trouble = Trouble::nothing;
  try {
    fixture.file->write(0, fixture.parts);
    FAIL("written");
  } catch (const IoError& error) {
    CHECK(error.code == EIO);
    CHECK(error.op == "write");
    CHECK(error.path.ends_with("/file"));
  }
  CHECK(fixture.file->size() == 0);
}
