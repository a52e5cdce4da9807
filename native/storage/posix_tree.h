// The way from a store's directory to the names in it, one system call a step.
//
// Every path is walked name by name from a descriptor of the store's directory, and no step follows a symbolic
// link: a store that was received from somebody else cannot make us read or write outside of it. Only the way to
// the store's directory itself may contain links. The descriptor is taken once, so a store that is renamed (or a
// process that changes its directory) stays with the files that it locked.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tierload/error.h"

namespace tierload::posix {

[[noreturn]] inline void fail(const char* op, const std::string& path, int code) { throw IoError(op, path, code); }

// Makes a system call until a signal does not interrupt it.
template <typename Call>
auto retry(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// Owns a file descriptor, or holds -1.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);  // not retried on EINTR: Linux has closed it, the number may be another file by now
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

struct stat stat_of(int fd, const char* op, const std::string& path);

// The errno for a thing that should be a regular file and is not.
int code_of_odd_file(mode_t mode);

// fsync of a directory.
void sync_directory(int fd, const char* op, const std::string& path);

// A path's last name, and the directory that it is in (O_PATH).
struct Place {
  std::shared_ptr<const Fd> dir;
  std::string name;
  int code = 0;  // an errno when that directory could not be entered
};

// A store's directory. `op` names the operation in errors. Safe to use from several threads.
class Tree {
 public:
  explicit Tree(const std::string& directory);

  // As it was given.
  const std::string& name() const { return directory_; }
  // What a person calls the path.
  std::string shown(const std::string& path) const;

  // The directory itself (O_PATH), or null and `code`.
  std::shared_ptr<const Fd> root(int& code);
  // Throws IoError(EINVAL) for a path that is not made of plain names.
  Place find(const char* op, const std::string& path);
  // A directory to be listed or synced; when that is impossible, not valid, and `code` is set.
  Fd open_dir(const char* op, const std::string& dir, int& code);
  // Creates the directory with its parents, and makes their names durable.
  void make_root(const char* op);

 private:
  std::vector<std::string> names_of(const char* op, const std::string& path) const;

  const std::string directory_;
  std::filesystem::path absolute_;  // where that was when it was given
  std::mutex mutex_;
  std::shared_ptr<const Fd> root_;
};

}  // namespace tierload::posix
