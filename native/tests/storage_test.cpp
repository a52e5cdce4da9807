// The posix storage: the common suite, and what only a real file system and real processes show.
#include "tierload/storage.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "conformance.h"
#include "tierload/error.h"

namespace fs = std::filesystem;
using namespace tierload;

namespace {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (fs::temp_directory_path() / "tierload-storage-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw IoError("mkdtemp", pattern, errno);
    path_ = pattern;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
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

struct stat stat_of(const fs::path& path) {
  struct stat info{};
  REQUIRE(::lstat(path.c_str(), &info) == 0);
  return info;
}

// A pipe over which processes wait for each other.
class Pipe {
 public:
  Pipe() { REQUIRE(::pipe2(ends_, O_CLOEXEC) == 0); }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    close_reader();
    close_writer();
  }
  void close_reader() { close_end(0); }
  void close_writer() { close_end(1); }
  void say(char what) const {
    if (::write(ends_[1], &what, 1) != 1) ::_exit(98);
  }
  // What the other side says, or 0 when there is nobody left who could.
  char hear() const {
    char what = 0;
    return ::read(ends_[0], &what, 1) == 1 ? what : '\0';
  }

 private:
  void close_end(int end) {
    if (ends_[end] >= 0) ::close(ends_[end]);
    ends_[end] = -1;
  }
  int ends_[2] = {-1, -1};
};

// Runs `body` in a child; its result is the child's exit status.
template <typename Body>
pid_t start(Body body) {
  std::fflush(stdout);  // or the child may print the report so far once more
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  int status = 99;
  try {
    status = body();
  } catch (...) {  // 99
  }
  ::_exit(status);
}

int status_of(pid_t pid) {
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  return status;
}

bool can_lock(const fs::path& store) {
  const auto storage = posix_storage(store.string());
  return storage->open("LOCK", OpenMode::read_write)->try_lock(true) != nullptr;
}

std::unique_ptr<Lock> new_lock(const fs::path& store) {
  const auto storage = posix_storage(store.string());
  storage->make_dir("");
  return storage->open("LOCK", OpenMode::create)->try_lock(true);
}

}  // namespace

TEST_CASE("posix storage conforms") {
  const TempDir temp;
  storage_conformance([&] { return posix_storage((temp / "store").string()); });
  data_conformance([&] { return posix_storage((temp / "store").string()); });
}

TEST_CASE("posix: before the directory exists there is nothing, and make_dir makes its parents") {
  const TempDir temp;
  const fs::path store = temp / "a/b/store";
  const auto storage = posix_storage(store.string());
  CHECK(storage->list("").empty());
  CHECK_FALSE(storage->size("file").has_value());
  CHECK_FALSE(storage->remove("file"));
  CHECK(code_of([&] { storage->open("file", OpenMode::create); }) == ENOENT);
  CHECK(code_of([&] { storage->sync_dir(""); }) == ENOENT);
  CHECK(code_of([&] { storage->free_bytes(); }) == ENOENT);
  storage->make_dir("");
  storage->open("file", OpenMode::create);
  CHECK(fs::exists(store / "file"));

  fs::remove_all(store);
  storage->make_dir("");
  storage->open("file", OpenMode::create);
  CHECK(fs::exists(store / "file"));

  std::ofstream(temp / "plain") << "x";
  CHECK(code_of([&] { posix_storage((temp / "plain").string())->make_dir(""); }) == ENOTDIR);
  CHECK(code_of([&] { posix_storage((temp / "plain/below").string())->make_dir(""); }) == ENOTDIR);
  CHECK(code_of([&] { posix_storage(""); }) == EINVAL);
}

TEST_CASE("posix: a store that is renamed, and a process that goes elsewhere, stay with their files") {
  const TempDir temp;
  const fs::path here = fs::current_path();
  fs::current_path(temp.path());
  const auto storage = posix_storage("store/");
  fs::current_path(here);
  storage->make_dir("");
  CHECK(fs::is_directory(temp / "store"));
  CHECK(storage->name() == "store/");
  fs::rename(temp / "store", temp / "moved");
  storage->open("file", OpenMode::create);
  CHECK(fs::exists(temp / "moved/file"));
  try {
    storage->open("absent", OpenMode::read);
    FAIL("opened");
  } catch (const IoError& error) {
    CHECK(error.path == "store/absent");
    CHECK(error.op == "open");
  }
}

TEST_CASE("posix: allocated is in bytes") {
  const TempDir temp;
  const auto storage = posix_storage(temp.path().string());
  const size_t size = 4 << 20;
  const auto file = storage->open("file", OpenMode::create);
  file->write(0, bytes_of(std::string(size, 'x')));
  file->sync();
  CHECK(storage->allocated("file") < 4 * size);  // file systems may take more in advance, but not that much
}

TEST_CASE("posix: modes follow the umask") {
  for (const mode_t mask : {mode_t{0022}, mode_t{0002}, mode_t{0027}}) {
    CAPTURE(mask);
    const TempDir temp;
    const mode_t before = ::umask(mask);
    const auto storage = posix_storage((temp / "up/store").string());
    storage->make_dir("");
    storage->make_dir("seg");
    storage->open("seg/file", OpenMode::create);
    ::umask(before);
    CHECK((stat_of(temp / "up").st_mode & 07777) == (0777U & ~mask));
    CHECK((stat_of(temp / "up/store").st_mode & 07777) == (0777U & ~mask));
    CHECK((stat_of(temp / "up/store/seg").st_mode & 07777) == (0777U & ~mask));
    CHECK((stat_of(temp / "up/store/seg/file").st_mode & 07777) == (0666U & ~mask));
  }
}

TEST_CASE("posix: what is made in a setgid directory belongs to its group") {
  const TempDir temp;
  const gid_t group = ::getuid() == 0 ? 54321 : ::getgid();
  REQUIRE(::chown(temp.path().c_str(), ::getuid(), group) == 0);
  REQUIRE(::chmod(temp.path().c_str(), 02775) == 0);
  const auto storage = posix_storage((temp / "store").string());
  storage->make_dir("");
  storage->make_dir("seg");
  storage->open("seg/file", OpenMode::create);
  for (const char* const name : {"store", "store/seg"}) {
    CHECK(stat_of(temp / name).st_gid == group);
    CHECK((stat_of(temp / name).st_mode & S_ISGID) != 0);
  }
  CHECK(stat_of(temp / "store/seg/file").st_gid == group);
}

TEST_CASE("posix: links inside a store are not followed, and odd files are refused") {
  const TempDir temp;
  fs::create_directories(temp / "outside/dir");
  std::ofstream(temp / "outside/secret") << "secret";
  fs::create_directory(temp / "real");
  fs::create_directory_symlink(temp / "real", temp / "store");  // the way to the store may be a link
  fs::create_symlink(temp / "outside/secret", temp / "real/file");
  fs::create_symlink(temp / "outside/absent", temp / "real/dangling");
  fs::create_directory_symlink(temp / "outside", temp / "real/seg");
  REQUIRE(::mkfifo((temp / "real/pipe").c_str(), 0666) == 0);
  const auto storage = posix_storage((temp / "store").string());
  storage->make_dir("");

  for (const OpenMode mode : {OpenMode::read, OpenMode::read_write}) {
    CHECK(code_of([&] { storage->open("file", mode); }) == ELOOP);
    CHECK(code_of([&] { storage->open("seg/secret", mode); }) == ELOOP);
    CHECK(code_of([&] { storage->open("pipe", mode); }) == EINVAL);  // and did not wait
  }
  CHECK(code_of([&] { storage->open("dangling", OpenMode::create); }) == EEXIST);
  CHECK(code_of([&] { storage->open("seg/new", OpenMode::create); }) == ELOOP);
  CHECK(code_of([&] { storage->size("file"); }) == ELOOP);
  CHECK(code_of([&] { storage->size("seg/secret"); }) == ELOOP);
  CHECK(code_of([&] { storage->size("pipe"); }) == EINVAL);
  CHECK(code_of([&] { storage->list("seg"); }) == ELOOP);
  CHECK(code_of([&] { storage->list("seg/dir"); }) == ELOOP);
  CHECK(code_of([&] { storage->make_dir("seg"); }) == ELOOP);
  CHECK(code_of([&] { storage->make_dir("seg/new"); }) == ELOOP);
  CHECK(code_of([&] { storage->sync_dir("seg"); }) == ELOOP);
  CHECK(code_of([&] { storage->remove("seg/secret"); }) == ELOOP);
  CHECK(storage->remove("file"));  // the link, not what it names
  CHECK(fs::exists(temp / "outside/secret"));
  CHECK_FALSE(fs::exists(temp / "outside/new"));
  CHECK_FALSE(fs::exists(temp / "outside/absent"));
}

TEST_CASE("posix: a lock excludes other processes and is released by SIGKILL") {
  const TempDir temp;
  Pipe up;
  const pid_t holder = start([&] {
    const std::unique_ptr<Lock> lock = new_lock(temp / "store");
    up.say(lock ? 'y' : 'n');
    ::pause();
    return 0;
  });
  up.close_writer();
  REQUIRE(up.hear() == 'y');
  CHECK_FALSE(can_lock(temp / "store"));
  ::kill(holder, SIGKILL);
  CHECK(WIFSIGNALED(status_of(holder)));
  CHECK(can_lock(temp / "store"));
}

TEST_CASE("posix: a child that outlives its killed parent does not hold the lock") {
  const TempDir temp;
  Pipe up;    // the trainer and the worker speak
  Pipe down;  // the test speaks; its end also ends the worker
  const pid_t trainer = start([&] {
    down.close_writer();
    const std::unique_ptr<Lock> lock = new_lock(temp / "store");
    start([&] {
      up.say('w');
      while (down.hear() == '?') up.say(can_lock(temp / "store") ? 'y' : 'n');
      return 0;
    });
    ::pause();
    return 0;
  });
  up.close_writer();
  REQUIRE(up.hear() == 'w');
  CHECK_FALSE(can_lock(temp / "store"));
  down.say('?');
  CHECK(up.hear() == 'n');  // the parent's lock holds against its child, too
  ::kill(trainer, SIGKILL);
  status_of(trainer);
  CHECK(can_lock(temp / "store"));
  down.say('?');
  CHECK(up.hear() == 'y');  // the worker is alive
}

TEST_CASE("posix: what a child does with its copy of a lock does not touch its parent's") {
  const TempDir temp;
  std::unique_ptr<Lock> lock = new_lock(temp / "store");
  REQUIRE(lock != nullptr);
  const pid_t child = start([&] {
    const int reused = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // most likely the number of the lock's descriptor
    lock.reset();
    if (::fcntl(reused, F_GETFD) == -1) return 2;
    return can_lock(temp / "store") ? 1 : 0;
  });
  CHECK(status_of(child) == 0);
  CHECK_FALSE(can_lock(temp / "store"));
  lock.reset();
  CHECK(can_lock(temp / "store"));
}

TEST_CASE("posix: a process made without fork handlers neither keeps a lock nor gives it away") {
  const TempDir temp;
  std::unique_ptr<Lock> lock = new_lock(temp / "store");
  REQUIRE(lock != nullptr);
  Pipe up;
  Pipe down;
  std::fflush(stdout);
  const long child = ::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (child == 0) {
    down.close_writer();
    lock.reset();
    up.say('r');
    down.hear();
    ::_exit(0);
  }
  REQUIRE(up.hear() == 'r');
  CHECK_FALSE(can_lock(temp / "store"));
  down.close_writer();
  status_of(static_cast<pid_t>(child));

  Pipe hold;
  const long other = ::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (other == 0) {
    hold.close_writer();
    hold.hear();
    ::_exit(0);
  }
  lock.reset();
  CHECK(can_lock(temp / "store"));
  hold.close_writer();
  status_of(static_cast<pid_t>(other));
}

TEST_CASE("posix: EFBIG in the middle of a write is reported with the path") {
  const TempDir temp;
  const pid_t child = start([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {10'000, 10'000};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    const auto storage = posix_storage((temp / "store").string());
    storage->make_dir("");
    const auto file = storage->open("file", OpenMode::create);
    const std::string text(6'000, 'x');
    try {
      const Bytes parts[] = {bytes_of(text), bytes_of(text)};
      file->write(0, parts);
      return 3;
    } catch (const IoError& error) {
      if (error.code != EFBIG || error.op != "write" || error.path != (temp / "store/file")) return 4;
    }
    return file->size() == 10'000 ? 0 : 5;  // the first, short write was followed by the one that failed
  });
  CHECK(status_of(child) == 0);
}

TEST_CASE("posix: ENOSPC is reported with the path, and space that is freed can be used") {
  const TempDir temp;
  if (::mount("tierload", temp.path().c_str(), "tmpfs", 0, "size=64k") != 0) {
    MESSAGE("skipped: cannot mount a tmpfs here");
    return;
  }
  const auto unmount = [](const TempDir* dir) { ::umount2(dir->path().c_str(), MNT_DETACH); };
  const std::unique_ptr<const TempDir, decltype(unmount)> mounted(&temp, unmount);
  const auto storage = posix_storage(temp.path().string());
  storage->make_dir("");
  const auto file = storage->open("file", OpenMode::create);
  try {
    file->write(0, bytes_of(std::string(1 << 20, 'x')));
    FAIL("written");
  } catch (const IoError& error) {
    CHECK(error.code == ENOSPC);
    CHECK(error.path == (temp / "file"));
  }
  CHECK(storage->free_bytes() == 0);
  if (file->punch(0, 8192)) CHECK(storage->free_bytes() == 8192);
  file->truncate(0);
  CHECK(storage->free_bytes() > 0);
  file->write(0, bytes_of("x"));
}
