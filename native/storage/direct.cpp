// io_uring and O_DIRECT for data; everything else is plain system calls.
#include "storage/direct.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cstring>

#include "storage/posix.h"
#include "tierload/bytes.h"
#include "tierload/device.h"

namespace tierload {
namespace posix {
namespace {

constexpr uint64_t fetch_memory = 64u << 20;  // of all buffers of one fetch
constexpr uint64_t kept_memory = 16u << 20;   // of a ring that waits for its next use

class DirectStorage : public Storage {
 public:
  DirectStorage(std::shared_ptr<Tree> tree, const DirectOptions& options)
      : tree_(tree), plain_(storage_on(std::move(tree))), options_(options) {}

  std::unique_ptr<Appender> append(File& file, const std::string& path, uint64_t expected) override {
    if (expected >= options_.least_bytes && owner_ == ::getpid()) {
      Fd fd = open_direct(*tree_, path, O_WRONLY);
      RingLoan ring = fd.valid() ? pool_->borrow(options_.depth, options_.block_bytes) : RingLoan();
      if (ring) return direct_appender(std::move(ring), std::move(fd), tree_->shown(path), expected);
    }
    return plain_->append(file, path, expected);
  }

  std::unique_ptr<Fetch> fetch(std::vector<std::string> files, std::vector<Fetch::Range> ranges, unsigned threads,
                               FetchOrder* order) override {
    uint64_t total = 0;
    uint64_t largest = 0;
    for (const Fetch::Range& range : ranges) {
      total += range.length;
      largest = std::max(largest, posix::block_bytes(range));
    }
    if (total < options_.least_bytes || owner_ != ::getpid() ||
        static_cast<double>(cached_bytes(*tree_, files, ranges)) > options_.warm * static_cast<double>(total)) {
      return plain_->fetch(std::move(files), std::move(ranges), threads, order);
    }
    const uint64_t slots = std::clamp<uint64_t>(fetch_memory / largest, 2, options_.depth + threads);
    RingLoan ring = pool_->borrow(static_cast<uint32_t>(slots), largest);
    if (!ring) return plain_->fetch(std::move(files), std::move(ranges), threads, order);
    return direct_fetch(std::move(ring), *plain_, tree_, std::move(files), std::move(ranges), order);
  }

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override { return plain_->open(path, mode); }
  std::optional<uint64_t> size(const std::string& path) override { return plain_->size(path); }
  std::vector<std::string> list(const std::string& dir) override { return plain_->list(dir); }
  void make_dir(const std::string& dir) override { plain_->make_dir(dir); }
  void sync_dir(const std::string& dir) override { plain_->sync_dir(dir); }
  bool remove(const std::string& path) override { return plain_->remove(path); }
  uint64_t free_bytes() override { return plain_->free_bytes(); }
  uint64_t allocated(const std::string& path) override { return plain_->allocated(path); }
  std::string name() const override { return plain_->name(); }
  uint64_t direct_bytes() const override { return pool_->moved(); }

 private:
  const std::shared_ptr<Tree> tree_;
  const std::unique_ptr<Storage> plain_;
  const DirectOptions options_;
  const std::shared_ptr<RingPool> pool_ = std::make_shared<RingPool>();
  const pid_t owner_ = ::getpid();  // a ring is shared with forked children: they do without
};

}  // namespace

RingLoan RingPool::borrow(uint32_t buffers, uint64_t buffer_bytes) {
  std::unique_ptr<Ring> ring;
  {
    const std::lock_guard guard(mutex_);
    const auto fits = [&](const auto& one) { return one->buffers() == buffers && one->buffer_bytes() == buffer_bytes; };
    const auto found = std::find_if(idle_.begin(), idle_.end(), fits);
    if (found != idle_.end()) {
      ring = std::move(*found);
      idle_.erase(found);
    }
  }
  try {
    if (!ring) ring = std::make_unique<Ring>(buffers, buffer_bytes);
  } catch (const UnsupportedError&) {
    return {};  // no descriptors or locked memory left for one more
  }
  return {ring.release(), [pool = shared_from_this()](Ring* done) {
            const std::lock_guard guard(pool->mutex_);
            pool->moved_ += done->take_moved();
            std::unique_ptr<Ring> ours(done);
            if (done->buffers() * done->buffer_bytes() > kept_memory) return;
            pool->idle_.clear();
            pool->idle_.push_back(std::move(ours));
          }};
}

Fd open_direct(Tree& tree, const std::string& path, int flags) {
  const Place place = tree.find("open", path);
  if (place.code != 0) {
    errno = place.code;
    return Fd();
  }
  flags |= O_DIRECT | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY;
  return Fd(retry([&] { return ::openat(place.dir->get(), place.name.c_str(), flags); }));
}

void check_direct(Tree& tree) {
  int code = 0;
  const std::shared_ptr<const Fd> root = tree.root(code);
  if (!root) throw UnsupportedError(std::string("the directory cannot be entered: ") + std::strerror(code));
  if (in_memory(tree.name())) throw UnsupportedError("the file system keeps its files in memory");
  // SUPER of a store that can only be read; a file without a name where there is no store yet.
  Fd fd = open_direct(tree, "SUPER", O_RDONLY);
  if (!fd.valid() && errno == ENOENT) {
    fd = Fd(retry([&] { return ::openat(root->get(), ".", O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600); }));
  }
  if (!fd.valid()) {
    throw UnsupportedError(std::string("the file system refuses direct I/O (O_DIRECT): ") + std::strerror(errno));
  }
#ifdef STATX_DIOALIGN
  struct statx info{};
  const int result = ::statx(fd.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &info);
  if (result == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
    const uint64_t unit = std::max(info.stx_dio_mem_align, info.stx_dio_offset_align);
    if (unit == 0) throw UnsupportedError("the file system has no direct I/O here");
    if (sector % unit != 0) throw UnsupportedError("direct I/O needs blocks of " + std::to_string(unit) + " bytes");
  }
#endif
}

}  // namespace posix

bool in_memory(const std::string& directory) {
  struct statfs system{};
  if (posix::retry([&] { return ::statfs(directory.c_str(), &system); }) != 0) {
    posix::fail("statfs", directory, errno);
  }
  return system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC;
}

std::string io_uring_refusal() {
  try {
    const posix::Ring ring(1, sector);
    return "";
  } catch (const UnsupportedError& error) {
    return error.what();
  }
}

std::unique_ptr<Storage> direct_storage(const std::string& directory, const DirectOptions& options) {
  static const std::string refusal = io_uring_refusal();  // the same all the time that a process lives
  if (!refusal.empty()) throw UnsupportedError(refusal);
  auto tree = std::make_shared<posix::Tree>(directory);
  posix::check_direct(*tree);
  return std::make_unique<posix::DirectStorage>(std::move(tree), options);
}

}  // namespace tierload
