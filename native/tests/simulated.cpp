#include "tests/simulated.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tierload/digest.h"
#include "tierload/error.h"

namespace tierload {
namespace {

// Offsets that no file can have.
void check_end(const char* op, const std::string& path, uint64_t offset, uint64_t length) {
  constexpr uint64_t end_max = uint64_t{1} << 62;
  if (offset > end_max || length > end_max || offset + length > end_max) throw IoError(op, path, EFBIG);
}

using Guard = std::lock_guard<std::recursive_mutex>;

void check_path(const std::string& path) {
  if (path.empty() || path.front() == '/' || path.back() == '/' || path.find('\0') != std::string::npos) {
    throw IoError("open", path, EINVAL);
  }
  for (size_t at = 0; at <= path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string part = path.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") throw IoError("open", path, EINVAL);
    at = end + 1;
  }
}

// `block` with a part that `change` has changed.
template <typename Change>
BlockPtr changed(const BlockPtr& block, Change change) {
  auto next = block ? std::make_shared<Block>(*block) : std::make_shared<Block>();
  change(next->bytes.data());
  next->hash = xxh3(next->bytes);
  return next;
}

}  // namespace

std::string parent(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

void Content::resize(uint64_t to) {
  if (to < size && to % block_bytes != 0) punch(to, std::min(size, (to / block_bytes + 1) * block_bytes) - to);
  blocks.resize((to + block_bytes - 1) / block_bytes);
  size = to;
}

void Content::write(uint64_t offset, Bytes data) {
  if (data.empty()) return;
  if (offset + data.size() > size) resize(offset + data.size());
  for (uint64_t done = 0; done < data.size();) {
    const uint64_t at = offset + done;
    BlockPtr& block = blocks[at / block_bytes];
    const uint64_t begin = at % block_bytes;
    const uint64_t length = std::min<uint64_t>(block_bytes - begin, data.size() - done);
    block = changed(block, [&](std::byte* bytes) { std::memcpy(bytes + begin, data.data() + done, length); });
    done += length;
  }
}

void Content::punch(uint64_t offset, uint64_t length) {
  const uint64_t end = std::min(offset + length, size);
  for (uint64_t at = offset; at < end;) {
    BlockPtr& block = blocks[at / block_bytes];
    const uint64_t begin = at % block_bytes;
    const uint64_t part = std::min(block_bytes - begin, end - at);
    if (block && part == block_bytes) {
      block = nullptr;
    } else if (block) {
      block = changed(block, [&](std::byte* bytes) { std::memset(bytes + begin, 0, part); });
    }
    at += part;
  }
}

size_t Content::read(uint64_t offset, MutableBytes into) const {
  if (offset >= size) return 0;
  const uint64_t length = std::min<uint64_t>(into.size(), size - offset);
  for (uint64_t done = 0; done < length;) {
    const uint64_t at = offset + done;
    const BlockPtr& block = blocks[at / block_bytes];
    const uint64_t begin = at % block_bytes;
    const uint64_t part = std::min(block_bytes - begin, length - done);
    if (block) {
      std::memcpy(into.data() + done, block->bytes.data() + begin, part);
    } else {
      std::memset(into.data() + done, 0, part);
    }
    done += part;
  }
  return length;
}

void Image::apply(const Call& call) {
  switch (call.kind) {
    case Call::Kind::create:
      if (dirs.contains(parent(call.path))) {
        names[call.path] = call.inode;
        files[call.inode];
      }
      return;
    case Call::Kind::remove:
      names.erase(call.path);
      return;
    case Call::Kind::make_dir:
      if (call.path.empty() || dirs.contains(parent(call.path))) dirs.insert(call.path);
      return;
    case Call::Kind::write:
      files[call.inode].write(call.offset, *call.data);
      return;
    case Call::Kind::truncate:
      files[call.inode].resize(call.length);
      return;
    case Call::Kind::punch:
      files[call.inode].punch(call.offset, call.length);
      return;
    case Call::Kind::sync:
    case Call::Kind::sync_dir:
      return;
  }
}

uint64_t Image::hash() const {
  static const uint64_t hole =
      changed(nullptr, [](std::byte*) {})->hash;  // a hole reads like zeros, so it hashes like them
  std::vector<uint64_t> all;
  for (const std::string& dir : dirs) all.push_back(xxh3(std::as_bytes(std::span(dir))));
  for (const auto& [path, inode] : names) {
    all.push_back(xxh3(std::as_bytes(std::span(path))));
    const auto file = files.find(inode);
    if (file == files.end()) continue;
    all.push_back(file->second.size);
    for (const BlockPtr& block : file->second.blocks) all.push_back(block ? block->hash : hole);
  }
  return xxh3(std::as_bytes(std::span(all)));
}

class SimulatedFile : public File {
 public:
  SimulatedFile(SimulatedStorage& storage, std::string path, uint32_t inode, bool writable)
      : storage_(storage), path_(std::move(path)), inode_(inode), writable_(writable) {}

  size_t read(uint64_t offset, MutableBytes into) override {
    const Guard guard(storage_.mutex_);
    return content().read(offset, into);
  }

  void write(uint64_t offset, std::span<const Bytes> parts) override {
    if (!writable_) throw IoError("write", path_, EBADF);
    auto data = std::make_shared<std::vector<std::byte>>();
    for (const Bytes part : parts) data->insert(data->end(), part.begin(), part.end());
    if (data->empty()) return;
    check_end("write", path_, offset, data->size());
    storage_.record({Call::Kind::write, "", inode_, offset, 0, std::move(data)});
  }

  void sync() override { storage_.record({Call::Kind::sync, "", inode_, 0, 0, nullptr}); }
  uint64_t size() override {
    const Guard guard(storage_.mutex_);
    return content().size;
  }

  void truncate(uint64_t size) override {
    if (!writable_) throw IoError("truncate", path_, EINVAL);
    check_end("truncate", path_, size, 0);
    storage_.record({Call::Kind::truncate, "", inode_, 0, size, nullptr});
  }

  bool punch(uint64_t offset, uint64_t length) override {
    if (!writable_) throw IoError("punch", path_, EBADF);
    check_end("punch", path_, offset, length);
    if (length == 0) return true;
    storage_.record({Call::Kind::punch, "", inode_, offset, length, nullptr});
    return true;
  }

  std::unique_ptr<Mapping> map(uint64_t length) override {
    class Copy : public Mapping {
     public:
      explicit Copy(uint64_t size) : bytes_(size) {}
      Bytes bytes() const override { return bytes_; }
      std::vector<std::byte> bytes_;
    };
    if (length > size()) throw IoError("map", path_, EINVAL);
    auto copy = std::make_unique<Copy>(length);
    read(0, copy->bytes_);
    return copy;
  }

  bool linked() override {
    const Guard guard(storage_.mutex_);
    const auto& names = storage_.now_.names;
    return std::any_of(names.begin(), names.end(), [&](const auto& entry) { return entry.second == inode_; });
  }

  bool locked() override {
    const Guard guard(storage_.mutex_);
    const auto found = storage_.locks_.find(inode_);
    return found != storage_.locks_.end() && found->second->exclusive;
  }

  std::unique_ptr<Lock> try_lock(bool exclusive) override {
    class Held : public Lock {
     public:
      Held(std::shared_ptr<SimulatedStorage::LockState> state, bool exclusive_lock)
          : state_(std::move(state)), exclusive_(exclusive_lock) {}
      ~Held() override {
        if (exclusive_) {
          state_->exclusive = false;
        } else {
          --state_->shared;
        }
      }
      std::shared_ptr<SimulatedStorage::LockState> state_;
      bool exclusive_;
    };
    if (exclusive && !writable_) throw IoError("lock", path_, EBADF);
    const Guard guard(storage_.mutex_);
    auto& state = storage_.locks_[inode_];
    if (!state) state = std::make_shared<SimulatedStorage::LockState>();
    if (state->exclusive || (exclusive && state->shared > 0)) return nullptr;
    if (exclusive) {
      state->exclusive = true;
    } else {
      ++state->shared;
    }
    return std::make_unique<Held>(state, exclusive);
  }

 private:
  const Content& content() const { return storage_.now_.files.at(inode_); }
  SimulatedStorage& storage_;
  const std::string path_;
  const uint32_t inode_;
  const bool writable_;
};

SimulatedStorage::SimulatedStorage(Image image) : now_(std::move(image)) {
  if (!now_.files.empty()) next_inode_ = now_.files.rbegin()->first + 1;
}

SimulatedStorage::SimulatedStorage(const Image& durable, std::span<const Call> calls) : SimulatedStorage(durable) {
  for (const Call& call : calls) {
    next_inode_ = std::max(next_inode_, call.inode + 1);
    record(call);
  }
}

void SimulatedStorage::record(Call call) {
  const Guard guard(mutex_);
  now_.apply(call);
  calls_.push_back(std::move(call));
}

// A file's name must not be a directory's, nor stand below another file's.
void SimulatedStorage::check_place(const std::string& path) const {
  check_path(path);
  if (now_.dirs.contains(path)) throw IoError("open", path, EISDIR);
}

std::unique_ptr<File> SimulatedStorage::open(const std::string& path, OpenMode mode) {
  const Guard guard(mutex_);
  check_path(path);
  if (now_.dirs.contains(path)) throw IoError("open", path, mode == OpenMode::create ? EEXIST : EISDIR);
  const auto found = now_.names.find(path);
  if (mode == OpenMode::create) {
    if (found != now_.names.end()) throw IoError("create", path, EEXIST);
    if (!now_.dirs.contains(parent(path))) throw IoError("create", path, ENOENT);
    const uint32_t inode = next_inode_++;
    record({Call::Kind::create, path, inode, 0, 0, nullptr});
    return std::make_unique<SimulatedFile>(*this, path, inode, true);
  }
  if (found == now_.names.end()) throw IoError("open", path, ENOENT);
  return std::make_unique<SimulatedFile>(*this, path, found->second, mode == OpenMode::read_write);
}

std::optional<uint64_t> SimulatedStorage::size(const std::string& path) {
  const Guard guard(mutex_);
  check_place(path);
  const auto found = now_.names.find(path);
  if (found == now_.names.end()) return std::nullopt;
  return now_.files.at(found->second).size;
}

std::vector<std::string> SimulatedStorage::list(const std::string& dir) {
  const Guard guard(mutex_);
  if (!dir.empty()) check_path(dir);
  std::vector<std::string> names;
  const std::string prefix = dir.empty() ? "" : dir + "/";
  for (auto it = now_.names.lower_bound(prefix); it != now_.names.end() && it->first.starts_with(prefix); ++it) {
    const std::string rest = it->first.substr(prefix.size());
    if (rest.find('/') == std::string::npos) names.push_back(rest);
  }
  for (const std::string& sub : now_.dirs) {
    if (sub.size() > prefix.size() && sub.starts_with(prefix) && sub.find('/', prefix.size()) == std::string::npos) {
      names.push_back(sub.substr(prefix.size()));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

void SimulatedStorage::make_dir(const std::string& dir) {
  const Guard guard(mutex_);
  if (!dir.empty()) {
    check_path(dir);
    if (now_.names.contains(dir)) throw IoError("make_dir", dir, EEXIST);
    if (!now_.dirs.contains(parent(dir))) throw IoError("make_dir", dir, ENOENT);
  }
  if (!now_.dirs.contains(dir)) record({Call::Kind::make_dir, dir, 0, 0, 0, nullptr});
}

void SimulatedStorage::sync_dir(const std::string& dir) {
  const Guard guard(mutex_);
  if (!dir.empty()) check_path(dir);
  if (!now_.dirs.contains(dir)) throw IoError("sync_dir", dir, ENOENT);
  record({Call::Kind::sync_dir, dir, 0, 0, 0, nullptr});
}

bool SimulatedStorage::remove(const std::string& path) {
  const Guard guard(mutex_);
  check_place(path);
  if (!now_.names.contains(path)) return false;
  record({Call::Kind::remove, path, 0, 0, 0, nullptr});
  return true;
}

uint64_t SimulatedStorage::allocated(const std::string& path) {
  const Guard guard(mutex_);
  check_place(path);
  const auto found = now_.names.find(path);
  if (found == now_.names.end()) return 0;
  const auto& blocks = now_.files.at(found->second).blocks;
  return static_cast<uint64_t>(std::count_if(blocks.begin(), blocks.end(), [](const BlockPtr& b) { return !!b; })) *
         block_bytes;
}

}  // namespace tierload
