// The storage that moves data past the page cache, on whatever file system the temporary directory is.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "conformance.h"
#include "tierload/error.h"

namespace fs = std::filesystem;
using namespace tierload;

namespace {

struct TempDir {
  fs::path path;
  explicit TempDir(const std::string& where) {
    std::string pattern = where + "/tierload-XXXXXX";
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path = pattern;
  }
  ~TempDir() { fs::remove_all(path); }
};

std::string temp_root() {
  const char* set = std::getenv("TMPDIR");
  return set == nullptr ? "/var/tmp" : set;
}

// Takes the direct way even for a few blocks that are in the page cache.
constexpr DirectOptions always = {64 * 1024, 4, 4096, 2.0};

// Nothing, with the reason on standard error, where this machine has no direct I/O.
std::shared_ptr<Storage> direct(const fs::path& path, const DirectOptions& options) {
  fs::create_directories(path);
  try {
    return direct_storage(path.string(), options);
  } catch (const UnsupportedError& error) {
    std::fprintf(stderr, "SKIPPED direct storage: %s\n", error.what());
    return nullptr;
  }
}

}  // namespace

TEST_CASE("direct storage conforms") {
  const TempDir temp(temp_root());
  if (direct(temp.path, always)) storage_conformance([&] { return direct(temp.path / "store", always); });
  if (direct(temp.path, always)) data_conformance([&] { return direct(temp.path / "store", always); });
}

TEST_CASE("direct storage steps aside where files live in memory") {
  const TempDir temp("/dev/shm");
  CHECK_THROWS_AS(direct_storage(temp.path.string(), {}), UnsupportedError);
}

TEST_CASE("direct: without a descriptor for a ring, data goes through the page cache") {
  const TempDir temp(temp_root());
  const auto storage = direct(temp.path, always);
  if (!storage) return;
  const std::vector<std::byte> bytes(1 << 20, std::byte{9});
  const auto file = storage->open("data", OpenMode::create);
  const int next = ::dup(0);
  REQUIRE(next >= 0);
  ::close(next);
  struct rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const struct rlimit one_more{static_cast<rlim_t>(next) + 1, before.rlim_max};  // the file itself, and no ring
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &one_more) == 0);
  auto appender = storage->append(*file, "data", bytes.size());
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  const Bytes part = bytes;
  appender->append(std::span(&part, 1));
  appender->finish();
  CHECK(storage->direct_bytes() == 0);
  std::vector<std::byte> got(bytes.size());
  CHECK(file->read(0, got) == bytes.size());
  CHECK(got == bytes);
}

TEST_CASE("direct: what is cold is read past the page cache, what is warm out of it") {
  const TempDir temp(temp_root());
  const auto storage = direct(temp.path, {64 * 1024, 4, 4096, 0.5});
  if (!storage) return;
  std::vector<std::byte> bytes(8 << 20, std::byte{7});
  const auto file = storage->open("data", OpenMode::create);
  file->write(0, Bytes(bytes));
  file->sync();
  const int fd = ::open((temp.path / "data").c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  const auto drop = [&] { REQUIRE(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0); };
  const std::vector<Fetch::Range> ranges = {{0, 0, 4u << 20, nullptr}, {0, 4u << 20, 4u << 20, nullptr}};
  // Pages that a read leaves in the cache say which way it took.
  const auto resident = [&] {
    std::vector<unsigned char> pages(bytes.size() / 4096);
    const auto mapping = file->map(bytes.size());
    REQUIRE(::mincore(const_cast<std::byte*>(mapping->bytes().data()), bytes.size(), pages.data()) == 0);
    return std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; });
  };
  const auto read_all = [&] {
    const auto fetch = storage->fetch({"data"}, ranges, 1);
    uint64_t good = 0;
    while (const auto arrival = fetch->next()) {
      good += static_cast<uint64_t>(std::count(arrival->bytes.begin(), arrival->bytes.end(), std::byte{7}));
      fetch->release(*arrival);
    }
    return good;
  };
  drop();
  REQUIRE(resident() == 0);
  CHECK(read_all() == bytes.size());
  CHECK(resident() == 0);
  REQUIRE(file->read(0, bytes) == bytes.size());
  CHECK(resident() == 2048);
  CHECK(read_all() == bytes.size());
  ::close(fd);
}
