// The storage whose calls fail: the common suite while nothing fails, and every kind of fault.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "conformance.h"
#include "tierload/error.h"
#include "tierload/storage.h"

using namespace tierload;
using Kind = Fault::Kind;

namespace {

// A storage that only counts what reaches it.
class Syncs : public Storage {
 public:
  class Sync : public File {
   public:
    explicit Sync(Syncs& owner) : owner_(owner) {}
    size_t read(uint64_t, MutableBytes) override { return 0; }
    void write(uint64_t, std::span<const Bytes>) override {}
    void sync() override { ++owner_.files; }
    uint64_t size() override { return 0; }
    void truncate(uint64_t) override {}
    bool punch(uint64_t, uint64_t) override { return true; }
    std::unique_ptr<Mapping> map(uint64_t) override { return nullptr; }
    bool linked() override { return true; }
    std::unique_ptr<Lock> try_lock(bool) override { return nullptr; }
    bool locked() override { return false; }

   private:
    Syncs& owner_;
  };
  std::unique_ptr<File> open(const std::string&, OpenMode) override { return std::make_unique<Sync>(*this); }
  std::optional<uint64_t> size(const std::string&) override { return 0; }
  std::vector<std::string> list(const std::string&) override { return {}; }
  void make_dir(const std::string&) override {}
  void sync_dir(const std::string&) override { ++dirs; }
  bool remove(const std::string&) override { return true; }
  uint64_t free_bytes() override { return 0; }
  uint64_t allocated(const std::string&) override { return 0; }
  std::string name() const override { return "syncs"; }
  int files = 0;
  int dirs = 0;
};

// A faulty storage on a directory that is removed in the end.
class Fixture {
 public:
  Fixture() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tierload-faulty-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
    storage = faulty_storage(posix_storage(pattern));
    storage->make_dir("");
  }
  ~Fixture() { std::filesystem::remove_all(path_); }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;
  const std::string& path() const { return path_; }

  std::shared_ptr<FaultyStorage> storage;

 private:
  std::string path_;
};

template <typename Call>
int code_of(Call call) {
  try {
    call();
    return 0;
  } catch (const IoError& error) {
    return error.code;
  }
}

Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string read(File& file) {
  std::string text(100, '?');
  text.resize(file.read(0, std::as_writable_bytes(std::span(text))));
  return text;
}

Fault fault(uint64_t at, Kind kind, const std::string& op = "", uint64_t times = 1) {
  return {.at = at, .kind = kind, .code = EIO, .times = times, .op = op};
}

}  // namespace

TEST_CASE("faulty storage conforms while nothing fails") {
  std::vector<std::unique_ptr<Fixture>> keep;
  const auto fresh = [&] { return keep.emplace_back(std::make_unique<Fixture>())->storage; };
  storage_conformance(fresh);
  data_conformance(fresh);
}

TEST_CASE("faulty: every call is counted, and each can fail by its number") {
  const Fixture fixture;
  FaultyStorage& storage = *fixture.storage;
  // Each step is one call of the name beside it; run again, after a failure, it does what it did not do before.
  std::unique_ptr<File> file;
  char byte = 0;
  const std::vector<std::pair<std::string, std::function<void()>>> steps = {
      {"make_dir", [&] { storage.make_dir("dir"); }},
      {"create", [&] { file = storage.open("file", OpenMode::create); }},
      {"write", [&] { file->write(0, bytes_of("text")); }},
      {"sync", [&] { file->sync(); }},
      {"sync_dir", [&] { storage.sync_dir(""); }},
      {"open", [&] { storage.open("file", OpenMode::read); }},
      {"read", [&] { file->read(0, std::as_writable_bytes(std::span(&byte, 1))); }},
      {"size", [&] { file->size(); }},
      {"size", [&] { storage.size("file"); }},
      {"map", [&] { file->map(1); }},
      {"lock", [&] { file->try_lock(true); }},
      {"linked", [&] { file->linked(); }},
      {"truncate", [&] { file->truncate(1); }},
      {"punch", [&] { file->punch(0, 1); }},
      {"list", [&] { storage.list(""); }},
      {"free_bytes", [&] { storage.free_bytes(); }},
      {"allocated", [&] { storage.allocated("file"); }},
      {"remove", [&] { storage.remove("file"); }},
  };
  for (size_t n = 1; n <= steps.size(); ++n) {
    CAPTURE(n);
    storage.arm(fault(n, Kind::fail));
    for (size_t i = 1; i <= steps.size(); ++i) {
      const auto& [op, step] = steps[i - 1];
      if (i == n) {
        CHECK_FALSE(storage.hit());
        try {
          step();
          FAIL("did not fail");
        } catch (const IoError& error) {
          CHECK(error.op == op);
          CHECK(error.code == EIO);
          CHECK(error.path.starts_with(fixture.path()));
        }
        CHECK(storage.hit());
        CHECK(storage.calls() == n);
        storage.disarm();
      }
      step();
    }
    CHECK(storage.calls() == steps.size() + 1);
    CHECK(storage.hit());
    file.reset();
  }
}

TEST_CASE("faulty: fail does nothing, fail_after does all, partial does half") {
  const Fixture fixture;
  FaultyStorage& storage = *fixture.storage;
  const auto file = storage.open("file", OpenMode::create);
  const Bytes parts[] = {bytes_of("abc"), bytes_of(""), bytes_of("defg")};

  storage.arm(fault(1, Kind::fail));
  CHECK(code_of([&] { file->write(0, parts); }) == EIO);
  CHECK(read(*file).empty());

  storage.arm(fault(1, Kind::partial));
  CHECK(code_of([&] { file->write(1, parts); }) == EIO);
  CHECK(read(*file) == std::string("\0abc", 4));
  storage.arm(fault(1, Kind::partial));
  CHECK(code_of([&] { file->truncate(0); }) == EIO);
  CHECK(read(*file).size() == 4);

  storage.arm(fault(1, Kind::fail_after));
  CHECK(code_of([&] { file->write(0, parts); }) == EIO);
  CHECK(read(*file) == "abcdefg");
  storage.arm(fault(1, Kind::fail_after));
  CHECK(code_of([&] { storage.open("other", OpenMode::create); }) == EIO);
  CHECK(storage.size("other") == 0);
  storage.arm(fault(1, Kind::fail_after));
  CHECK(code_of([&] { storage.remove("other"); }) == EIO);
  CHECK_FALSE(storage.size("other").has_value());
  storage.arm(fault(1, Kind::fail_after));
  CHECK(code_of([&] { file->try_lock(true); }) == EIO);
  CHECK(file->try_lock(true) != nullptr);
}

TEST_CASE("faulty: a lie is told by syncs alone") {
  const auto inner = std::make_shared<Syncs>();
  const auto storage = faulty_storage(inner);
  const auto file = storage->open("file", OpenMode::create);
  storage->arm(fault(1, Kind::lie, "", 3));
  file->write(0, bytes_of("x"));
  CHECK_FALSE(storage->hit());
  file->sync();
  CHECK(storage->hit());
  storage->sync_dir("");
  CHECK(inner->files == 0);
  CHECK(inner->dirs == 0);
  file->sync();
  storage->sync_dir("");
  CHECK(inner->files == 1);
  CHECK(inner->dirs == 1);
}

TEST_CASE("faulty: one operation alone, several times, for ever, and no more") {
  const Fixture fixture;
  FaultyStorage& storage = *fixture.storage;
  const auto file = storage.open("file", OpenMode::create);
  storage.arm(fault(2, Kind::fail, "write", 2));
  std::vector<int> codes;
  for (int i = 0; i < 5; ++i) {
    file->size();
    codes.push_back(code_of([&] { file->write(0, bytes_of("x")); }));
  }
  CHECK(codes == std::vector<int>{0, EIO, EIO, 0, 0});
  CHECK(storage.calls() == 5);

  storage.arm(fault(2, Kind::fail, "", UINT64_MAX));
  file->sync();
  for (int i = 0; i < 5; ++i) CHECK(code_of([&] { file->sync(); }) == EIO);
  storage.disarm();
  file->sync();
  CHECK(storage.calls() == 7);
  CHECK(storage.hit());
  storage.arm(fault(0, Kind::fail));
  file->sync();
  CHECK(storage.calls() == 1);
  CHECK_FALSE(storage.hit());
  CHECK_THROWS_AS(storage.arm(fault(1, Kind::fail, "fsync")), UsageError);
}

TEST_CASE("faulty: of many threads exactly one meets the fault") {
  const Fixture fixture;
  const auto file = fixture.storage->open("file", OpenMode::create);
  fixture.storage->arm(fault(100, Kind::fail, "write"));
  std::vector<int> failed(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < failed.size(); ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 50; ++i) failed[t] += code_of([&] { file->write(t, bytes_of("x")); }) == EIO;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failed[0] + failed[1] + failed[2] + failed[3] == 1);
  CHECK(fixture.storage->calls() == 200);
}

TEST_CASE("faulty: files outlive their storage") {
  Fixture fixture;
  const auto file = fixture.storage->open("file", OpenMode::create);
  fixture.storage.reset();
  file->write(0, bytes_of("x"));
  CHECK(read(*file) == "x");
}
