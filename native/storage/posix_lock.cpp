// An OFD lock belongs to an open file description, and fork() shares descriptions with the child: a data-loader
// worker that outlives its killed trainer would keep the store locked. So the locks of a process are listed, and a
// forked child closes their descriptors before it does anything else.
#include "storage/posix_lock.h"

#include <fcntl.h>
#include <pthread.h>

#include <set>

namespace tierload::posix {
namespace {

class PosixLock;

// Fork waits for `mutex`, so there is no moment in which a lock exists and is not listed.
struct HeldLocks {
  std::mutex mutex;
  std::set<PosixLock*> locks;
};

HeldLocks& held_locks() {
  static HeldLocks* const held = new HeldLocks;  // never destroyed: forks and destructors may come at any time
  return *held;
}

int set_lock(int fd, short type) {
  struct flock whole{};  // l_start = l_len = 0: all of the file, however it grows
  whole.l_type = type;
  whole.l_whence = SEEK_SET;
  return retry([&] { return ::fcntl(fd, F_OFD_SETLK, &whole); });
}

class PosixLock : public Lock {
 public:
  // The caller holds the mutex.
  explicit PosixLock(Fd&& fd) {
    held_locks().locks.insert(this);
    fd_ = std::move(fd);
  }
  PosixLock(const PosixLock&) = delete;
  PosixLock& operator=(const PosixLock&) = delete;

  ~PosixLock() override {
    HeldLocks& held = held_locks();
    const std::lock_guard guard(held.mutex);
    held.locks.erase(this);
    // To unlock, and not just to close, works even if a process made by a bare clone(), which runs no fork handlers,
    // has the description open as well; and such a process must not do it in our place.
    if (fd_.valid() && owner_ == ::getpid()) set_lock(fd_.get(), F_UNLCK);
    const Fd closing = std::move(fd_);  // under the mutex: a child never closes a number that means another file
  }

  // In a forked child. Only close() is called, which is allowed there; the list stays as it is.
  void forget() { const Fd closing = std::move(fd_); }

 private:
  Fd fd_;
  const pid_t owner_ = ::getpid();
};

void before_fork() { held_locks().mutex.lock(); }
void after_fork_in_parent() { held_locks().mutex.unlock(); }
void after_fork_in_child() {
  for (PosixLock* const lock : held_locks().locks) lock->forget();
  held_locks().mutex.unlock();
}

}  // namespace

std::unique_ptr<Lock> try_lock(const std::function<Fd()>& reopen, bool exclusive, const std::string& path) {
  static const int code = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (code != 0) fail("lock", path, code);
  const std::lock_guard guard(held_locks().mutex);
  Fd fd = reopen();
  if (set_lock(fd.get(), exclusive ? F_WRLCK : F_RDLCK) == 0) return std::make_unique<PosixLock>(std::move(fd));
  if (errno == EAGAIN || errno == EACCES) return nullptr;
  fail("lock", path, errno);
}

bool locked(int fd, const std::string& path) {
  struct flock whole{};
  whole.l_type = F_RDLCK;  // only an exclusive lock is in the way of this
  whole.l_whence = SEEK_SET;
  if (retry([&] { return ::fcntl(fd, F_OFD_GETLK, &whole); }) != 0) fail("lock", path, errno);
  return whole.l_type != F_UNLCK;
}

}  // namespace tierload::posix
