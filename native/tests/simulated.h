// A file system in memory that remembers every call, so that what a crash would leave can be built and opened.
//
// Fault model. A call changes the *volatile* view at once, as the page cache does. Nothing is durable before a sync:
//  * a file's sync makes its earlier writes, truncations and punches durable; a directory's sync makes the names that
//    were made or removed in it so far durable. Nothing else is.
//  * a power cut keeps, of all calls that are not durable yet, any subset, in their order; a write may be torn: each
//    512-byte sector of it is there or not, and the file may be longer without the bytes (they read as zeros). A disk
//    that rewrites physical blocks of 4 KiB may also lose other sectors of a block that was being written.
//  * a kill (the process dies, the machine lives on) keeps the volatile view, and the undurable calls stay undurable.
// What it does not model: media that lie about a sync, and rot (another test flips bits).
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tierload/storage.h"

namespace tierload {

constexpr uint64_t block_bytes = 4096;

struct Block {
  std::array<std::byte, block_bytes> bytes{};
  uint64_t hash = 0;  // of `bytes`, computed when the block is made
};
using BlockPtr = std::shared_ptr<const Block>;

std::string parent(const std::string& path);  // the directory that holds it

// A file's bytes; a null block is a hole.
struct Content {
  uint64_t size = 0;
  std::vector<BlockPtr> blocks;

  void write(uint64_t offset, Bytes data);
  void resize(uint64_t to);
  void punch(uint64_t offset, uint64_t length);
  size_t read(uint64_t offset, MutableBytes into) const;
};

struct Call {
  enum class Kind { create, remove, make_dir, write, truncate, punch, sync, sync_dir };
  Kind kind;
  std::string path;  // create, remove, make_dir, sync_dir
  uint32_t inode = 0;
  uint64_t offset = 0;
  uint64_t length = 0;  // truncate: the size; punch: the length
  std::shared_ptr<const std::vector<std::byte>> data;
};

// What is on a disk: names and contents.
struct Image {
  std::set<std::string> dirs;
  std::map<std::string, uint32_t> names;
  std::map<uint32_t, Content> files;

  void apply(const Call& call);
  uint64_t hash() const;  // of everything that can be seen through names
};

class SimulatedStorage : public Storage {
 public:
  SimulatedStorage() : SimulatedStorage(Image{}) {}
  explicit SimulatedStorage(Image image);
  // A machine that lives on after a kill: `calls` were made on `durable`, all can be seen, some are not durable.
  SimulatedStorage(const Image& durable, std::span<const Call> calls);

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override;
  std::optional<uint64_t> size(const std::string& path) override;
  std::vector<std::string> list(const std::string& dir) override;
  void make_dir(const std::string& dir) override;
  void sync_dir(const std::string& dir) override;
  bool remove(const std::string& path) override;
  uint64_t free_bytes() override { return uint64_t{1} << 40; }
  uint64_t allocated(const std::string& path) override;
  std::string name() const override { return "simulated"; }

  const std::vector<Call>& calls() const { return calls_; }
  const Image& now() const { return now_; }

 private:
  friend class SimulatedFile;
  void record(Call call);
  void check_place(const std::string& path) const;

  struct LockState {
    int shared = 0;
    bool exclusive = false;
  };
  std::recursive_mutex mutex_;  // the contract allows threads, so the suite uses them
  Image now_;
  std::vector<Call> calls_;
  uint32_t next_inode_ = 1;
  std::map<uint32_t, std::shared_ptr<LockState>> locks_;
};

}  // namespace tierload
