#include "conformance.h"

#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tierload/error.h"

using tierload::Bytes;
using tierload::File;
using tierload::IoError;
using tierload::Lock;
using tierload::Mapping;
using tierload::OpenMode;
using tierload::Storage;

namespace {

using Names = std::vector<std::string>;

// The errno that a call fails with, or 0. An error has to say where it happened.
template <typename Call>
int code_of(const std::string& path, Call call) {
  try {
    call();
    return 0;
  } catch (const IoError& error) {
    CHECK_FALSE(error.op.empty());
    CHECK(error.path.ends_with(path));
    CHECK(std::string_view(error.what()).find(path) != std::string_view::npos);
    return error.code;
  }
}

Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::string read(File& file, uint64_t offset, size_t length) {
  std::string text(length, '?');
  text.resize(file.read(offset, std::as_writable_bytes(std::span(text))));
  return text;
}

std::unique_ptr<File> create(Storage& storage, const std::string& path, std::string_view text) {
  std::unique_ptr<File> file = storage.open(path, OpenMode::create);
  file->write(0, bytes_of(text));
  return file;
}

void names_and_directories(Storage& storage) {
  SUBCASE("make_dir may be repeated") {
    storage.make_dir("");
    storage.make_dir("seg");
    storage.make_dir("seg");
    storage.make_dir("seg/deep");
    CHECK(storage.list("") == Names{"seg"});
    CHECK(storage.list("seg") == Names{"deep"});
    storage.sync_dir("");
    storage.sync_dir("seg");
    storage.sync_dir("seg/deep");
  }
  SUBCASE("make_dir wants the directory above") {
    CHECK(code_of("a/b", [&] { storage.make_dir("a/b"); }) == ENOENT);
    CHECK(storage.list("").empty());
  }
  SUBCASE("make_dir on a file's name fails") {
    create(storage, "file", "x");
    CHECK(code_of("file", [&] { storage.make_dir("file"); }) != 0);
    CHECK(storage.size("file") == 1);
  }
  SUBCASE("list sorts by bytes and knows files and directories of one level") {
    storage.make_dir("seg");
    for (const char* const name : {"b", "a", "B", "\xc3\xa9", "a-", "a0", "seg/z", "seg/y"}) create(storage, name, "");
    CHECK(storage.list("") == Names{"B", "a", "a-", "a0", "b", "seg", "\xc3\xa9"});
    CHECK(storage.list("seg") == Names{"y", "z"});
  }
  SUBCASE("what is absent") {
    CHECK(storage.list("").empty());
    CHECK(storage.list("absent").empty());
    CHECK(storage.list("absent/deeper").empty());
    CHECK_FALSE(storage.size("absent").has_value());
    CHECK_FALSE(storage.size("absent/deeper").has_value());
    CHECK(storage.allocated("absent") == 0);
    CHECK_FALSE(storage.remove("absent"));
    CHECK_FALSE(storage.remove("absent/deeper"));
    CHECK(code_of("absent", [&] { storage.open("absent", OpenMode::read); }) == ENOENT);
    CHECK(code_of("absent", [&] { storage.open("absent", OpenMode::read_write); }) == ENOENT);
    CHECK(code_of("absent/file", [&] { storage.open("absent/file", OpenMode::create); }) == ENOENT);
    CHECK(code_of("absent", [&] { storage.sync_dir("absent"); }) == ENOENT);
    CHECK(storage.list("").empty());
  }
  SUBCASE("a file is no directory and a directory no file") {
    create(storage, "file", "x");
    storage.make_dir("dir");
    CHECK_FALSE(storage.size("file/below").has_value());
    CHECK(code_of("file/below", [&] { storage.open("file/below", OpenMode::read); }) != 0);
    CHECK(code_of("dir", [&] { storage.open("dir", OpenMode::read); }) != 0);
    CHECK(code_of("dir", [&] { storage.open("dir", OpenMode::create); }) == EEXIST);
    CHECK(code_of("dir", [&] { storage.remove("dir"); }) != 0);
    CHECK(storage.list("") == Names{"dir", "file"});
  }
  SUBCASE("odd names are refused by every call") {
    storage.make_dir("a");
    create(storage, "a/b", "inside");
    const std::vector<std::string> odd = {"/",
                                          "/a",
                                          "//a",
                                          "..",
                                          "../a",
                                          "a/..",
                                          "a/../a/b",
                                          "a//b",
                                          "a/",
                                          ".",
                                          "./a",
                                          "a/.",
                                          "a/./b",
                                          "a/b/",
                                          std::string("a\0b", 3),
                                          std::string("a/b\0", 4),
                                          std::string("\0", 1)};
    for (const std::string& name : odd) {
      CAPTURE(name);
      CHECK(code_of("", [&] { storage.open(name, OpenMode::read); }) == EINVAL);
      CHECK(code_of("", [&] { storage.open(name, OpenMode::read_write); }) == EINVAL);
      CHECK(code_of("", [&] { storage.open(name, OpenMode::create); }) == EINVAL);
      CHECK(code_of("", [&] { storage.size(name); }) == EINVAL);
      CHECK(code_of("", [&] { storage.allocated(name); }) == EINVAL);
      CHECK(code_of("", [&] { storage.remove(name); }) == EINVAL);
      CHECK(code_of("", [&] { storage.list(name); }) == EINVAL);
      CHECK(code_of("", [&] { storage.make_dir(name); }) == EINVAL);
      CHECK(code_of("", [&] { storage.sync_dir(name); }) == EINVAL);
    }
    CHECK(code_of("", [&] { storage.open("", OpenMode::read); }) == EINVAL);
    CHECK(code_of("", [&] { storage.open("", OpenMode::create); }) == EINVAL);
    CHECK(code_of("", [&] { storage.size(""); }) == EINVAL);
    CHECK(code_of("", [&] { storage.remove(""); }) == EINVAL);
    CHECK(storage.list("") == Names{"a"});
    CHECK(storage.list("a") == Names{"b"});
  }
  SUBCASE("names with dots and spaces are plain names") {
    for (const char* const name : {"...", "..a", ".a", "a b", "00000001-000000000001.r0000.m"}) {
      create(storage, name, name);
      CHECK(storage.size(name) == std::string_view(name).size());
    }
    CHECK(storage.list("").size() == 5);
  }
  SUBCASE("it knows its name and its room") {
    CHECK_FALSE(storage.name().empty());
    CHECK(storage.free_bytes() > 0);
  }
}

void opening(Storage& storage) {
  SUBCASE("create is exclusive") {
    create(storage, "file", "first");
    CHECK(code_of("file", [&] { storage.open("file", OpenMode::create); }) == EEXIST);
    CHECK(storage.size("file") == 5);
    CHECK(read(*storage.open("file", OpenMode::read), 0, 9) == "first");
    CHECK(storage.remove("file"));
    create(storage, "file", "");
    CHECK(storage.size("file") == 0);
  }
  SUBCASE("two handles see one file") {
    const auto one = create(storage, "file", "abc");
    const auto two = storage.open("file", OpenMode::read_write);
    const auto three = storage.open("file", OpenMode::read);
    two->write(1, bytes_of("XYZ"));
    CHECK(read(*one, 0, 9) == "aXYZ");
    CHECK(read(*three, 0, 9) == "aXYZ");
    one->truncate(2);
    CHECK(three->size() == 2);
    CHECK(storage.size("file") == 2);
  }
  SUBCASE("a file opened for reading cannot be changed") {
    create(storage, "file", "abc");
    const auto file = storage.open("file", OpenMode::read);
    CHECK(code_of("file", [&] { file->write(0, bytes_of("X")); }) != 0);
    CHECK(code_of("file", [&] { file->truncate(0); }) != 0);
    CHECK(code_of("file", [&] { file->punch(0, 1); }) != 0);
    CHECK(read(*file, 0, 9) == "abc");
  }
  SUBCASE("a file lives as long as its handle, and longer than its storage's directory entry") {
    const auto file = create(storage, "file", "old");
    CHECK(file->linked());
    CHECK(storage.remove("file"));
    CHECK_FALSE(storage.remove("file"));
    CHECK_FALSE(file->linked());
    CHECK_FALSE(storage.size("file").has_value());
    const auto next = create(storage, "file", "new one");
    CHECK(next->linked());
    CHECK_FALSE(file->linked());
    file->write(3, bytes_of("er"));
    file->sync();
    CHECK(read(*file, 0, 9) == "older");
    CHECK(read(*next, 0, 9) == "new one");
  }
}

void bytes_in_files(Storage& storage) {
  const auto file = storage.open("file", OpenMode::create);
  SUBCASE("reads end where the file ends") {
    file->write(0, bytes_of("0123456789"));
    CHECK(read(*file, 0, 10) == "0123456789");
    CHECK(read(*file, 3, 4) == "3456");
    CHECK(read(*file, 7, 100) == "789");
    CHECK(read(*file, 3, 0).empty());
    for (const uint64_t past : {uint64_t{10}, uint64_t{11}, uint64_t{1} << 40, uint64_t{INT64_MAX} - 2,
                                uint64_t{INT64_MAX}, uint64_t{INT64_MAX} + 1, UINT64_MAX}) {
      CAPTURE(past);
      CHECK(read(*file, past, 5).empty());
    }
    CHECK(file->size() == 10);
  }
  SUBCASE("writes overwrite and extend") {
    file->write(0, bytes_of("aaaa"));
    file->write(2, bytes_of("bbbb"));
    file->write(0, bytes_of("c"));
    CHECK(read(*file, 0, 100) == "cabbbb");
    CHECK(storage.size("file") == 6);
  }
  SUBCASE("an empty write changes nothing") {
    file->write(0, bytes_of(""));
    file->write(100, bytes_of(""));
    file->write(200, std::span<const Bytes>());
    const std::array<Bytes, 2> nothing = {};
    file->write(300, nothing);
    CHECK(file->size() == 0);
  }
  SUBCASE("many parts, some of them empty, are one text") {
    std::vector<std::string> texts;
    std::string all(77, '\0');
    for (size_t i = 0; i < 5000; ++i) texts.push_back(std::string(i % 7, static_cast<char>('a' + i % 26)));
    texts.push_back(std::string(300'000, 'z'));
    texts.emplace_back();
    std::vector<Bytes> parts;
    for (const std::string& text : texts) {
      parts.push_back(bytes_of(text));
      all += text;
    }
    file->write(77, parts);
    CHECK(file->size() == all.size());
    CHECK(read(*file, 0, all.size() + 1) == all);
  }
  SUBCASE("what was never written reads as zeros") {
    file->write(0, bytes_of("head"));
    file->write(1'000'000, bytes_of("tail"));
    CHECK(file->size() == 1'000'004);
    std::string expected(1'000'004, '\0');
    expected.replace(0, 4, "head").replace(1'000'000, 4, "tail");
    CHECK(read(*file, 0, 1'000'004) == expected);
  }
  SUBCASE("truncate cuts and extends, and what was cut is gone") {
    file->write(0, bytes_of("0123456789"));
    file->truncate(4);
    CHECK(read(*file, 0, 100) == "0123");
    file->truncate(8);
    CHECK(read(*file, 0, 100) == std::string("0123\0\0\0\0", 8));
    file->truncate(0);
    CHECK(file->size() == 0);
    file->write(2, bytes_of("x"));
    CHECK(read(*file, 0, 100) == std::string("\0\0x", 3));
    file->sync();
  }
  SUBCASE("offsets that no file can have are refused") {
    CHECK(code_of("file", [&] { file->write(UINT64_MAX - 2, bytes_of("abc")); }) == EFBIG);
    CHECK(code_of("file", [&] { file->write(uint64_t{1} << 63, bytes_of("abc")); }) == EFBIG);
    CHECK(code_of("file", [&] { file->truncate(UINT64_MAX); }) == EFBIG);
    CHECK(code_of("file", [&] { file->punch(4096, UINT64_MAX - 1); }) == EFBIG);
    CHECK(file->size() == 0);
  }
  SUBCASE("punch makes zeros or says that it cannot, and keeps the size") {
    const std::string full(5 * 4096, 'x');
    for (const std::pair<size_t, size_t>& range :
         {std::pair<size_t, size_t>{4096, 8192}, {100, 50}, {5 * 4096 - 10, 100}}) {
      const size_t offset = range.first;
      const size_t length = range.second;
      CAPTURE(offset);
      file->write(0, bytes_of(full));
      std::string expected = full;
      const size_t inside = std::min(length, full.size() - offset);
      if (file->punch(offset, length)) expected.replace(offset, inside, inside, '\0');
      CHECK(file->size() == full.size());
      CHECK(read(*file, 0, full.size() + 1) == expected);
    }
    file->write(0, bytes_of(full));
    file->punch(0, 0);
    file->punch(full.size() + 4096, 4096);
    CHECK(read(*file, 0, full.size() + 1) == full);
  }
  SUBCASE("holes take no room") {
    file->write(0, bytes_of(std::string(65'536, 'x')));
    file->sync();
    const uint64_t full = storage.allocated("file");
    CHECK(full > 0);
    if (file->punch(16'384, 32'768)) {
      file->sync();
      CHECK(storage.allocated("file") < full);
    }
    file->truncate(64'000'000);
    file->sync();
    CHECK(storage.allocated("file") < 1'000'000);
    storage.remove("file");
    CHECK(storage.allocated("file") == 0);
  }
  SUBCASE("threads write and read ranges that do not overlap") {
    constexpr size_t block = 3000;
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&file, t] {
        for (size_t i = t; i < 64; i += 4) {
          const std::string text(block, static_cast<char>('A' + i % 50));
          file->write(i * block, bytes_of(text));
          std::string back(block, '?');
          file->read(i * block, std::as_writable_bytes(std::span(back)));
          if (back != text) file->write(i * block, bytes_of("wrong"));  // checked below: doctest is for one thread
        }
        file->sync();
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(file->size() == 64 * block);
    for (size_t i = 0; i < 64; ++i) {
      CHECK(read(*file, i * block, block) == std::string(block, static_cast<char>('A' + i % 50)));
    }
  }
}

void mappings(Storage& storage) {
  auto file = create(storage, "file", std::string(10'000, 'm') + "end");
  SUBCASE("a mapping shows the first bytes") {
    CHECK(text_of(file->map(10'003)->bytes()) == std::string(10'000, 'm') + "end");
    CHECK(text_of(file->map(5)->bytes()) == "mmmmm");
    CHECK(file->map(0)->bytes().empty());
    CHECK(text_of(storage.open("file", OpenMode::read)->map(5)->bytes()) == "mmmmm");
  }
  SUBCASE("more than the file has is refused") {
    CHECK(code_of("file", [&] { file->map(10'004); }) == EINVAL);
    CHECK(code_of("file", [&] { file->map(UINT64_MAX); }) == EINVAL);
  }
  SUBCASE("a mapping outlives the name and the handle") {
    const std::unique_ptr<Mapping> mapping = file->map(10'003);
    storage.remove("file");
    file.reset();
    create(storage, "file", "another");
    CHECK(text_of(mapping->bytes()).ends_with("mmmend"));
  }
}

void locks(Storage& storage) {
  auto one = create(storage, "LOCK", "");
  const auto two = storage.open("LOCK", OpenMode::read_write);
  const auto reader = storage.open("LOCK", OpenMode::read);
  SUBCASE("an exclusive lock excludes all others, until it is destroyed") {
    std::unique_ptr<Lock> held = one->try_lock(true);
    REQUIRE(held != nullptr);
    CHECK(two->try_lock(true) == nullptr);
    CHECK(two->try_lock(false) == nullptr);
    CHECK(reader->try_lock(false) == nullptr);
    CHECK(one->try_lock(true) == nullptr);  // not even the same handle has it twice
    CHECK(one->try_lock(false) == nullptr);
    CHECK(reader->locked());
    held.reset();
    CHECK_FALSE(reader->locked());
    CHECK(two->try_lock(true) != nullptr);
  }
  SUBCASE("shared locks exclude an exclusive one, until the last is destroyed") {
    std::unique_ptr<Lock> first = reader->try_lock(false);
    std::unique_ptr<Lock> second = one->try_lock(false);
    std::unique_ptr<Lock> third = one->try_lock(false);
    REQUIRE(first != nullptr);
    REQUIRE(second != nullptr);
    REQUIRE(third != nullptr);
    CHECK_FALSE(two->locked());
    CHECK(two->try_lock(true) == nullptr);
    first.reset();
    third.reset();
    CHECK(two->try_lock(true) == nullptr);
    second.reset();
    CHECK(two->try_lock(true) != nullptr);
  }
  SUBCASE("a lock does not depend on the handle, and the handle not on the lock") {
    std::unique_ptr<Lock> held = one->try_lock(true);
    REQUIRE(held != nullptr);
    one.reset();
    CHECK(two->try_lock(true) == nullptr);
    storage.open("LOCK", OpenMode::read_write).reset();  // closing some other handle gives nothing away
    CHECK(two->try_lock(true) == nullptr);
    held.reset();
    two->write(0, bytes_of("holder"));
    CHECK(two->try_lock(true) != nullptr);
  }
  SUBCASE("an exclusive lock needs a file that can be written") {
    CHECK(code_of("LOCK", [&] { reader->try_lock(true); }) == EBADF);
    CHECK(one->try_lock(true) != nullptr);
  }
  SUBCASE("a lock is on the file and not on its name") {
    storage.remove("LOCK");
    const auto next = create(storage, "LOCK", "");
    const std::unique_ptr<Lock> old = one->try_lock(true);
    REQUIRE(old != nullptr);
    CHECK(two->try_lock(true) == nullptr);
    CHECK(next->try_lock(true) != nullptr);
  }
  SUBCASE("different files have different locks") {
    const auto other = create(storage, "other", "");
    const std::unique_ptr<Lock> held = one->try_lock(true);
    CHECK(other->try_lock(true) != nullptr);
  }
}

}  // namespace

void storage_conformance(const std::function<std::shared_ptr<Storage>()>& fresh) {
  const std::shared_ptr<Storage> storage = fresh();
  storage->make_dir("");
  SUBCASE("names and directories") { names_and_directories(*storage); }
  SUBCASE("opening") { opening(*storage); }
  SUBCASE("bytes in files") { bytes_in_files(*storage); }
  SUBCASE("mappings") { mappings(*storage); }
  SUBCASE("locks") { locks(*storage); }
}
