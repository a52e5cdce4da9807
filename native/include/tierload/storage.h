// The one interface through which the core touches a file system.
//
// Contract, for every implementation (native/tests/conformance.cpp holds it to this):
//  * Paths are relative to the store's directory, made of `/`-separated names; anything else (absolute, `..`, empty
//    names, NUL) is IoError(EINVAL), and an implementation never leaves that directory, not even through a symlink.
//  * A call either does all that it says or throws IoError with the operation, the path and the errno.
//    Short reads and writes and EINTR are handled inside.
//  * Nothing is durable before sync() (a file's bytes and size) and sync_dir() (the names in a directory)
//    have returned. A failed sync leaves the file in an unknown state; callers never retry it.
//  * Files are safe to use from several threads as long as written ranges do not overlap.
//  * Offsets that no file can have: reads give 0 bytes, everything else is IoError(EFBIG). Writing nothing and punching
//    nothing do nothing. A directory or another special file under a file's name is an error.
//  * Objects returned own what they hold: closing is destruction. Closing never throws; a caller that
//    cares has called sync().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tierload {

using Bytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

enum class OpenMode {
  read,        // must exist
  read_write,  // must exist
  create,      // must not exist (O_EXCL); read and write; mode 0666 & ~umask
};

// A range of a file in memory, read-only, valid until destroyed (even if the file is unlinked meanwhile). A file that
// is cut short meanwhile, or a medium that fails, ends the process with SIGBUS: map only what nobody overwrites.
class Mapping {
 public:
  virtual ~Mapping() = default;
  virtual Bytes bytes() const = 0;
};

// A held lock; released by destruction, and by the kernel when the process dies. A forked child does not hold it: it
// would outlive a killed trainer otherwise.
class Lock {
 public:
  virtual ~Lock() = default;
};

class File {
 public:
  virtual ~File() = default;

  // Reads into all of `into` from `offset`; returns how many bytes there were before the end of the file.
  virtual size_t read(uint64_t offset, MutableBytes into) = 0;
  // Writes the parts one after the other from `offset`, extending the file when needed.
  virtual void write(uint64_t offset, std::span<const Bytes> parts) = 0;
  // Makes the file's bytes and size durable (fdatasync).
  virtual void sync() = 0;
  virtual uint64_t size() = 0;
  virtual void truncate(uint64_t size) = 0;
  // Gives [offset, offset + length) back to the file system; it reads as zeros. Where the file system cannot,
  // returns false and the bytes stay.
  virtual bool punch(uint64_t offset, uint64_t length) = 0;
  // Maps the first `length` bytes; throws IoError(EINVAL) when the file is shorter.
  virtual std::unique_ptr<Mapping> map(uint64_t length) = 0;
  // True while the file still has a name.
  virtual bool linked() = 0;
  // An OFD lock on the whole file, or nullptr when somebody else's lock is in the way. Never waits.
  // An exclusive lock needs a file opened for writing (EBADF). The lock may outlive the File object.
  virtual std::unique_ptr<Lock> try_lock(bool exclusive) = 0;

  void write(uint64_t offset, Bytes data) { write(offset, std::span<const Bytes>(&data, 1)); }
};

class Storage {
 public:
  virtual ~Storage() = default;

  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode) = 0;
  // The size of a file, or nothing when there is none of that name (ENOENT); other failures throw.
  virtual std::optional<uint64_t> size(const std::string& path) = 0;
  // Names in a directory, sorted, without `.` and `..`; an absent directory has none.
  virtual std::vector<std::string> list(const std::string& dir) = 0;
  // Creates a directory in one that exists, if it is not there. Mode 0777 & ~umask. "" is the store's own: its missing
  // parents are made too, and their names are durable when it returns.
  virtual void make_dir(const std::string& dir) = 0;
  // Makes the names in a directory durable; "" is the store's own directory.
  virtual void sync_dir(const std::string& dir) = 0;
  // Removes a file; absent is fine (returns false).
  virtual bool remove(const std::string& path) = 0;
  virtual uint64_t free_bytes() = 0;
  // Bytes that a file takes on the device (holes take none); 0 when it is absent.
  virtual uint64_t allocated(const std::string& path) = 0;
  // What a person calls this place, for messages: the store's path.
  virtual std::string name() const = 0;
};

// Plain system calls on a directory.
std::unique_ptr<Storage> posix_storage(const std::string& directory);

// Wraps another storage and makes chosen calls fail. Counts every call (reads and writes, metadata too).
struct Fault {
  enum class Kind {
    fail,        // the call throws IoError(errno); nothing was done
    fail_after,  // the call is done, then throws IoError(errno): a lost reply
    partial,     // a write puts half of its bytes in place, then throws IoError(errno); else like `fail`
    lie,         // a sync returns without syncing (the wrapped storage is not asked); else like nothing
  };
  uint64_t at;  // number of the call, from 1
  Kind kind;
  int code;            // errno
  uint64_t times = 1;  // so many calls in a row
  std::string op;      // "" = any; else counts and hits only this operation: "read", "write", "sync", "sync_dir",
                       // "open", "create", "remove", "truncate", "punch", "list", "make_dir", "map", "lock",
                       // "size", "linked", "free_bytes", "allocated"
};
class FaultyStorage : public Storage {
 public:
  virtual void arm(const Fault& fault) = 0;  // replaces the fault and restarts the count
  virtual void disarm() = 0;
  virtual uint64_t calls() const = 0;  // since arm()
  virtual bool hit() const = 0;        // whether the fault has happened
};
std::unique_ptr<FaultyStorage> faulty_storage(std::shared_ptr<Storage> inner);

}  // namespace tierload
