// The interface of tierload/storage.h as plain system calls on a directory.
#include "storage/posix.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/uio.h>

#include <algorithm>

#include "storage/posix_lock.h"

namespace tierload {
namespace posix {
namespace {

static_assert(sizeof(off_t) == 8, "offsets beyond 2 GiB need a 64-bit off_t");

constexpr uint64_t offset_max = INT64_MAX;
// One call moves at most this much: Linux cuts at 2 GiB - 4 KiB anyway, and some file systems fail above 1 GiB.
constexpr size_t bytes_per_call_max = size_t{1} << 30;
constexpr size_t parts_per_call_max = IOV_MAX;

class PosixMapping : public Mapping {
 public:
  PosixMapping(void* data, size_t length) : data_(data), length_(length) {}
  PosixMapping(const PosixMapping&) = delete;
  PosixMapping& operator=(const PosixMapping&) = delete;
  ~PosixMapping() override {
    if (length_ != 0) ::munmap(data_, length_);
  }
  Bytes bytes() const override { return {static_cast<const std::byte*>(data_), length_}; }

 private:
  void* const data_;
  const size_t length_;
};

// The parts of one write, and how far it has come.
class Gather {
 public:
  explicit Gather(std::span<const Bytes> parts) : parts_(parts) {}

  // Puts what comes next into batch(), as much as one call may take; false when all is written.
  bool next() {
    batch_.clear();
    bytes_ = 0;
    size_t from = used_;
    for (size_t i = part_; i < parts_.size() && bytes_ < bytes_per_call_max && batch_.size() < parts_per_call_max;
         ++i) {
      const Bytes piece = parts_[i].subspan(from, std::min(parts_[i].size() - from, bytes_per_call_max - bytes_));
      if (!piece.empty()) batch_.push_back({const_cast<std::byte*>(piece.data()), piece.size()});
      bytes_ += piece.size();
      from = 0;
    }
    return !batch_.empty();
  }

  void advance(size_t written) {
    used_ += written;
    while (part_ < parts_.size() && used_ >= parts_[part_].size()) used_ -= parts_[part_++].size();
  }

  const std::vector<iovec>& batch() const { return batch_; }
  size_t bytes() const { return bytes_; }

 private:
  const std::span<const Bytes> parts_;
  size_t part_ = 0;
  size_t used_ = 0;  // bytes of parts_[part_] that are written
  std::vector<iovec> batch_;
  size_t bytes_ = 0;  // in batch_
};

class PosixFile : public File {
 public:
  PosixFile(std::shared_ptr<Tree> tree, std::string path, Fd fd, bool writable)
      : tree_(std::move(tree)), path_(std::move(path)), fd_(std::move(fd)), writable_(writable) {}

  size_t read(uint64_t offset, MutableBytes into) override {
    size_t done = 0;
    // An offset that no file can have is past the end, whatever a damaged table says.
    const uint64_t room = offset < offset_max ? offset_max - offset : 0;
    const size_t length = static_cast<size_t>(std::min<uint64_t>(into.size(), room));
    while (done < length) {
      const size_t want = std::min(length - done, bytes_per_call_max);
      const off_t at = static_cast<off_t>(offset + done);
      const ssize_t got = retry([&] { return ::pread(fd_.get(), into.data() + done, want, at); });
      if (got < 0) fail("read", shown(), errno);
      if (got == 0) break;
      done += static_cast<size_t>(got);
    }
    return done;
  }

  void will_read(uint64_t offset, uint64_t length) override {
    if (offset > offset_max || length > offset_max - offset) return;
    // A file system that takes no hints is none the worse for it.
    ::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_RANDOM);
    ::posix_fadvise(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(length), POSIX_FADV_WILLNEED);
  }

  void write(uint64_t offset, std::span<const Bytes> parts) override {
    for (Gather gather(parts); gather.next();) {
      if (offset > offset_max || gather.bytes() > offset_max - offset) fail("write", shown(), EFBIG);
      const int count = static_cast<int>(gather.batch().size());
      const off_t at = static_cast<off_t>(offset);
      const ssize_t put = retry([&] { return ::pwritev(fd_.get(), gather.batch().data(), count, at); });
      if (put < 0) fail("write", shown(), errno);
      if (put == 0) fail("write", shown(), EIO);  // no progress and no reason: to go on could take forever
      gather.advance(static_cast<size_t>(put));
      offset += static_cast<uint64_t>(put);
    }
  }

  void sync() override {
    // EINTR alone is repeated: it says that the waiting stopped, not that a page was lost.
    if (retry([&] { return ::fdatasync(fd_.get()); }) != 0) fail("sync", shown(), errno);
  }

  uint64_t size() override { return static_cast<uint64_t>(stat_of(fd_.get(), "size", shown()).st_size); }

  void truncate(uint64_t size) override {
    if (size > offset_max) fail("truncate", shown(), EFBIG);
    if (retry([&] { return ::ftruncate(fd_.get(), static_cast<off_t>(size)); }) != 0) fail("truncate", shown(), errno);
  }

  bool punch(uint64_t offset, uint64_t length) override {
    if (length == 0) return true;  // the system call refuses this
    if (offset > offset_max || length > offset_max - offset) fail("punch", shown(), EFBIG);
    const int result = retry([&] {
      return ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                         static_cast<off_t>(length));
    });
    if (result == 0) return true;
    if (errno == EOPNOTSUPP || errno == ENOSYS) return false;
    fail("punch", shown(), errno);
  }

  std::unique_ptr<Mapping> map(uint64_t length) override {
    // Checked here because the system maps past the end too, and kills whoever looks there.
    if (length > static_cast<uint64_t>(stat_of(fd_.get(), "map", shown()).st_size)) fail("map", shown(), EINVAL);
    if (length == 0) return std::make_unique<PosixMapping>(nullptr, 0);
    void* const data = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd_.get(), 0);
    if (data == MAP_FAILED) fail("map", shown(), errno);
    return std::make_unique<PosixMapping>(data, length);
  }

  bool linked() override { return stat_of(fd_.get(), "linked", shown()).st_nlink > 0; }

  std::unique_ptr<Lock> try_lock(bool exclusive) override {
    return posix::try_lock([this] { return reopen(); }, exclusive, shown());
  }

  bool locked() override { return posix::locked(fd_.get(), shown()); }

 private:
  std::string shown() const { return tree_->shown(path_); }

  // A description of this file of its own. A dup() would share ours: two locks through one File would be one, and
  // neither could be let go alone. /proc/self/fd leads to the very inode that is open, even when its name is gone or
  // means another file by now; it is a link by nature, so O_NOFOLLOW has no place here. Without /proc (a bare
  // chroot) the name is opened again, and counts only if it is still the same inode.
  Fd reopen() {
    const int flags = (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC;
    const std::string self = "/proc/self/fd/" + std::to_string(fd_.get());
    Fd fd(retry([&] { return ::open(self.c_str(), flags); }));
    if (fd.valid()) return fd;
    if (errno != ENOENT) fail("lock", shown(), errno);
    const Place place = tree_->find("lock", path_);
    if (place.code != 0) fail("lock", shown(), place.code);
    fd = Fd(retry(
        [&] { return ::openat(place.dir->get(), place.name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY); }));
    if (!fd.valid()) fail("lock", shown(), errno);
    const struct stat ours = stat_of(fd_.get(), "lock", shown());
    const struct stat named = stat_of(fd.get(), "lock", shown());
    if (ours.st_dev != named.st_dev || ours.st_ino != named.st_ino) fail("lock", shown(), ESTALE);
    return fd;
  }

  const std::shared_ptr<Tree> tree_;
  const std::string path_;
  const Fd fd_;
  const bool writable_;
};

class PosixStorage : public Storage {
 public:
  explicit PosixStorage(std::shared_ptr<Tree> tree) : tree_(std::move(tree)) {}

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    const char* const op = mode == OpenMode::create ? "create" : "open";
    const Place place = tree_->find(op, path);
    if (place.code != 0) fail(op, tree_->shown(path), place.code);
    int flags = mode == OpenMode::read ? O_RDONLY : O_RDWR;
    if (mode == OpenMode::create) flags |= O_CREAT | O_EXCL;
    // O_NONBLOCK: a pipe under a segment's name is refused below, and not waited for.
    flags |= O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    Fd fd(retry([&] { return ::openat(place.dir->get(), place.name.c_str(), flags, 0666); }));
    if (!fd.valid()) fail(op, tree_->shown(path), errno);
    const struct stat info = stat_of(fd.get(), op, tree_->shown(path));
    if (!S_ISREG(info.st_mode)) fail(op, tree_->shown(path), code_of_odd_file(info.st_mode));
    ::fcntl(fd.get(), F_SETFL, 0);  // no effect on a regular file, except that io_uring takes it for "never wait"
    return std::make_unique<PosixFile>(tree_, path, std::move(fd), mode != OpenMode::read);
  }

  std::optional<uint64_t> size(const std::string& path) override {
    const std::optional<struct stat> info = look("size", path);
    if (!info) return std::nullopt;
    return static_cast<uint64_t>(info->st_size);
  }

  std::vector<std::string> list(const std::string& dir) override {
    int code = 0;
    Fd fd = tree_->open_dir("list", dir, code);
    if (code == ENOENT) return {};
    if (code != 0) fail("list", tree_->shown(dir), code);
    DIR* const stream = ::fdopendir(fd.get());
    if (stream == nullptr) fail("list", tree_->shown(dir), errno);
    fd.release();
    const std::shared_ptr<DIR> closing(stream, ::closedir);
    std::vector<std::string> names;
    while (true) {
      errno = 0;
      const dirent* const entry = ::readdir(stream);
      if (entry == nullptr && errno != 0) fail("list", tree_->shown(dir), errno);
      if (entry == nullptr) break;
      std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(std::move(name));
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  void make_dir(const std::string& dir) override {
    if (dir.empty()) return tree_->make_root("make_dir");
    const Place place = tree_->find("make_dir", dir);
    if (place.code != 0) fail("make_dir", tree_->shown(dir), place.code);
    if (retry([&] { return ::mkdirat(place.dir->get(), place.name.c_str(), 0777); }) == 0) return;
    if (errno != EEXIST) fail("make_dir", tree_->shown(dir), errno);
    int code = 0;  // is what exists a directory?
    tree_->open_dir("make_dir", dir, code);
    if (code != 0) fail("make_dir", tree_->shown(dir), code);
  }

  void sync_dir(const std::string& dir) override {
    int code = 0;
    const Fd fd = tree_->open_dir("sync_dir", dir, code);
    if (code != 0) fail("sync_dir", tree_->shown(dir), code);
    sync_directory(fd.get(), "sync_dir", tree_->shown(dir));
  }

  bool remove(const std::string& path) override {
    const Place place = tree_->find("remove", path);
    int code = place.code;
    const auto unlink = [&] { return ::unlinkat(place.dir->get(), place.name.c_str(), 0); };
    if (code == 0 && retry(unlink) != 0) code = errno;
    if (code == ENOENT || code == ENOTDIR) return false;
    if (code != 0) fail("remove", tree_->shown(path), code);
    return true;
  }

  uint64_t free_bytes() override {
    int code = 0;
    const std::shared_ptr<const Fd> root = tree_->root(code);
    struct statvfs info{};
    if (root && retry([&] { return ::fstatvfs(root->get(), &info); }) != 0) code = errno;
    if (code != 0) fail("free_bytes", name(), code);
    return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;  // without what is kept for root
  }

  uint64_t allocated(const std::string& path) override {
    const std::optional<struct stat> info = look("allocated", path);
    return info ? static_cast<uint64_t>(info->st_blocks) * 512 : 0;  // st_blocks has this unit everywhere on Linux
  }

  std::string name() const override { return tree_->name(); }

 private:
  // What is known of a regular file; nothing when it is absent.
  std::optional<struct stat> look(const char* op, const std::string& path) {
    const Place place = tree_->find(op, path);
    int code = place.code;
    struct stat info{};
    const auto stat = [&] { return ::fstatat(place.dir->get(), place.name.c_str(), &info, AT_SYMLINK_NOFOLLOW); };
    if (code == 0 && retry(stat) != 0) code = errno;
    if (code == ENOENT || code == ENOTDIR) return std::nullopt;
    if (code == 0 && !S_ISREG(info.st_mode)) code = code_of_odd_file(info.st_mode);
    if (code != 0) fail(op, tree_->shown(path), code);
    return info;
  }

  const std::shared_ptr<Tree> tree_;
};

}  // namespace

std::unique_ptr<Storage> storage_on(std::shared_ptr<Tree> tree) {
  return std::make_unique<PosixStorage>(std::move(tree));
}

}  // namespace posix

std::unique_ptr<Storage> posix_storage(const std::string& directory) {
  return posix::storage_on(std::make_shared<posix::Tree>(directory));
}

}  // namespace tierload
