#include "storage/posix_tree.h"

#include <fcntl.h>

#include <algorithm>

namespace tierload::posix {
namespace {

// Opens a directory by one name, without following it when it is a link; -1 and `code` when that is impossible.
Fd enter(int dir, const std::string& name, int flags, int& code) {
  Fd fd(retry([&] { return ::openat(dir, name.c_str(), flags | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }));
  if (fd.valid()) return fd;
  code = errno;
  struct stat info{};
  // Linux says ENOTDIR of a link, too; a person who moved `seg` to another disk should be told which one it is.
  const bool link =
      code == ENOTDIR && ::fstatat(dir, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
  if (link) code = ELOOP;
  return fd;
}

// Creates what is missing of `path`; returns how many directories that were.
size_t make_path(const char* op, const std::filesystem::path& path) {
  struct stat info{};
  if (retry([&] { return ::stat(path.c_str(), &info); }) == 0) {
    if (!S_ISDIR(info.st_mode)) fail(op, path.string(), ENOTDIR);
    return 0;
  }
  if (errno != ENOENT) fail(op, path.string(), errno);
  const std::filesystem::path parent = path.parent_path();
  const size_t made = parent == path ? 0 : make_path(op, parent);
  if (retry([&] { return ::mkdir(path.c_str(), 0777); }) == 0) return made + 1;
  if (errno != EEXIST) fail(op, path.string(), errno);  // EEXIST: another process was faster
  return made;
}

}  // namespace

struct stat stat_of(int fd, const char* op, const std::string& path) {
  struct stat info{};
  if (retry([&] { return ::fstat(fd, &info); }) != 0) fail(op, path, errno);
  return info;
}

int code_of_odd_file(mode_t mode) {
  if (S_ISDIR(mode)) return EISDIR;
  return S_ISLNK(mode) ? ELOOP : EINVAL;
}

void sync_directory(int fd, const char* op, const std::string& path) {
  // EINVAL: a file system without fsync for directories (some network and FUSE ones). Names are as durable there as
  // it makes them, and to refuse to save would help nobody. Every other error is a real one.
  if (retry([&] { return ::fsync(fd); }) != 0 && errno != EINVAL) fail(op, path, errno);
}

Tree::Tree(const std::string& directory) : directory_(directory) {
  if (directory.empty() || directory.find('\0') != std::string::npos) fail("open", directory, EINVAL);
  std::error_code error;
  absolute_ = std::filesystem::absolute(directory, error);
  if (error) fail("open", directory, error.value());
}

std::string Tree::shown(const std::string& path) const {
  if (path.empty()) return directory_;
  return directory_.back() == '/' ? directory_ + path : directory_ + "/" + path;
}

std::shared_ptr<const Fd> Tree::root(int& code) {
  const std::lock_guard guard(mutex_);
  if (!root_) {
    Fd fd(retry([&] { return ::open(absolute_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC); }));
    if (!fd.valid()) {
      code = errno;
      return nullptr;
    }
    root_ = std::make_shared<const Fd>(std::move(fd));
  }
  return root_;
}

std::vector<std::string> Tree::names_of(const char* op, const std::string& path) const {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string name = path.substr(begin, end - begin);
    if (name.empty() || name == "." || name == ".." || name.find('\0') != std::string::npos) {
      fail(op, shown(path), EINVAL);
    }
    names.push_back(name);
    begin = end + 1;
  }
  return names;
}

Place Tree::find(const char* op, const std::string& path) {
  const std::vector<std::string> names = names_of(op, path);
  Place place;
  place.name = names.back();
  place.dir = root(place.code);
  for (size_t i = 0; place.code == 0 && i + 1 < names.size(); ++i) {
    place.dir = std::make_shared<const Fd>(enter(place.dir->get(), names[i], O_PATH, place.code));
  }
  return place;
}

Fd Tree::open_dir(const char* op, const std::string& dir, int& code) {
  if (dir.empty()) {
    const std::shared_ptr<const Fd> self = root(code);
    return self ? enter(self->get(), ".", O_RDONLY, code) : Fd();
  }
  const Place place = find(op, dir);
  code = place.code;
  return code == 0 ? enter(place.dir->get(), place.name, O_RDONLY, code) : Fd();
}

void Tree::make_root(const char* op) {
  const size_t made = make_path(op, absolute_);
  {
    const std::lock_guard guard(mutex_);
    root_ = nullptr;  // after a removal and a new creation the old descriptor is a directory without a name
  }
  int code = 0;
  Fd fd = open_dir(op, "", code);
  if (!fd.valid()) fail(op, directory_, code);
  // Nobody else makes these names durable: sync_dir() reaches no further up than the directory itself. The nearest
  // parent is synced even if nothing was created, since whoever made the directory may not have done it.
  for (size_t i = 0; i < std::max<size_t>(made, 1); ++i) {
    fd = Fd(retry([&] { return ::openat(fd.get(), "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
    if (!fd.valid() && (errno == EACCES || errno == EPERM)) return;  // a parent that we may cross but not read
    if (!fd.valid()) fail(op, directory_, errno);
    sync_directory(fd.get(), op, directory_);
  }
}

}  // namespace tierload::posix
