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
  // A hint: these bytes will be read soon. From the first one on, nothing else of the file is read ahead.
  virtual void will_read(uint64_t /*offset*/, uint64_t /*length*/) {}
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

  // Whether somebody else's exclusive lock is on the file now. Asking disturbs nobody.
  virtual bool locked() = 0;

  void write(uint64_t offset, Bytes data) { write(offset, std::span<const Bytes>(&data, 1)); }
};

// Writes a new file from front to back.
class Appender {
 public:
  virtual ~Appender() = default;
  // The parts may be reused when it returns, but their bytes may still be on their way: a failure is thrown by this
  // call, a later one, or finish(). Every call moves whole blocks of 4 KiB.
  virtual void append(std::span<const Bytes> parts) = 0;
  // Somebody else writes the next bytes into the file. Throws UsageError where that cannot be.
  virtual void skip(uint64_t bytes) = 0;
  // Waits until the file holds everything that was appended and nothing else; only sync() makes that durable. To be
  // destroyed without it gives the file up.
  virtual void finish() = 0;
};

// Ranges of files that are being read, as many at a time as suits the device. Threads take them as they arrive.
class Fetch {
 public:
  struct Range {
    uint32_t file = 0;  // an index into the names
    uint64_t offset = 0;
    uint64_t length = 0;
    std::byte* into = nullptr;  // room for it, written by next() alone; without, memory of the fetch's own
  };
  struct Arrival {
    size_t range = 0;
    Bytes bytes;        // what there was before the end of the file
    std::string error;  // why there is nothing, for a person; "" when it was read
    size_t slot = 0;    // the implementation's
  };
  virtual ~Fetch() = default;
  // Waits for a range that nobody has taken, in any order; nothing when all are. Its bytes come into `room`, if that is
  // large enough and the range has none of its own. Throws IoError only for a failure that has nothing to do with the
  // file (no descriptors left, ...).
  virtual std::optional<Arrival> next(MutableBytes room) = 0;
  std::optional<Arrival> next() { return next(MutableBytes()); }
  // The thread that took it has done with its bytes.
  virtual void release(const Arrival& arrival) = 0;
};

// Given back also when its user fails: others would wait for its room for ever.
struct Taken {
  Fetch& fetch;
  const Fetch::Arrival& arrival;
  ~Taken() { fetch.release(arrival); }
};

// Which range of a fetch begins next, where that is not the order in which they were given. Each is named once. A fetch
// asks while it holds a lock of its own: the answer must not wait.
class FetchOrder {
 public:
  virtual ~FetchOrder() = default;
  virtual size_t next() = 0;
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
  // Fills `file`, which was created as `path` and is empty, with about `expected` bytes; it outlives the appender.
  virtual std::unique_ptr<Appender> append(File& file, const std::string& path, uint64_t expected);
  // Reads ranges, best sorted by file and offset, or in an `order` that outlives the fetch. `threads` will take them.
  // What `into` points to stays valid.
  virtual std::unique_ptr<Fetch> fetch(std::vector<std::string> files, std::vector<Fetch::Range> ranges,
                                       unsigned threads, FetchOrder* order = nullptr);
  virtual uint64_t free_bytes() = 0;
  // Bytes that a file takes on the device (holes take none); 0 when it is absent.
  virtual uint64_t allocated(const std::string& path) = 0;
  // Bytes that were moved past the page cache so far.
  virtual uint64_t direct_bytes() const { return 0; }
  // What a person calls this place, for messages: the store's path.
  virtual std::string name() const = 0;
};

// Plain system calls on a directory.
std::unique_ptr<Storage> posix_storage(const std::string& directory);

// The same, with data moved by io_uring past the page cache. Throws UnsupportedError, which says why, where the kernel,
// a sandbox or the file system has no part in it; the directory must exist.
struct DirectOptions {
  uint32_t block_bytes = 1u << 20;  // of one transfer; a multiple of 4 KiB
  uint32_t depth = 8;               // transfers on their way at a time
  uint64_t least_bytes = 8u << 20;  // less is moved faster through the page cache
  double warm = 0.5;                // what the page cache has a larger share of is read from there
};
std::unique_ptr<Storage> direct_storage(const std::string& directory, const DirectOptions& options);

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
