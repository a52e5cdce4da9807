// A storage that does what another one does, except for the calls that a test wants to fail.
#include <algorithm>
#include <array>
#include <mutex>
#include <string_view>
#include <utility>

#include "tierload/error.h"
#include "tierload/storage.h"

namespace tierload {
namespace {

constexpr std::array<std::string_view, 17> ops = {"read",   "write",    "sync",   "sync_dir",   "open",     "create",
                                                  "remove", "truncate", "punch",  "list",       "make_dir", "map",
                                                  "lock",   "size",     "linked", "free_bytes", "allocated"};

// The fault and the count, shared by the storage and its files, which may outlive it. Safe for threads: calls are
// numbered in the order in which they ask.
class Plan {
 public:
  void arm(const Fault& fault) {
    // A fault that can never happen would make every test with it pass.
    if (!fault.op.empty() && std::find(ops.begin(), ops.end(), fault.op) == ops.end()) {
      throw UsageError("no storage call is named '" + fault.op + "'");
    }
    const std::lock_guard guard(mutex_);
    fault_ = fault;
    op_ = fault.op;
    calls_ = 0;
    hit_ = false;
  }

  void disarm() {
    const std::lock_guard guard(mutex_);
    fault_.reset();  // calls are counted as before
  }

  uint64_t calls() const {
    const std::lock_guard guard(mutex_);
    return calls_;
  }

  bool hit() const {
    const std::lock_guard guard(mutex_);
    return hit_;
  }

  // Counts a call; returns the fault that this one suffers.
  std::optional<Fault> next(std::string_view op) {
    const std::lock_guard guard(mutex_);
    if (!op_.empty() && op_ != op) return std::nullopt;
    ++calls_;
    if (!fault_ || fault_->at == 0 || calls_ < fault_->at || calls_ - fault_->at >= fault_->times) return std::nullopt;
    if (fault_->kind == Fault::Kind::lie && op != "sync" && op != "sync_dir") return std::nullopt;
    hit_ = true;
    return fault_;
  }

  // Makes one call, with what the plan has for it.
  template <typename Call>
  auto run(std::string_view op, const std::string& path, Call call) -> decltype(call()) {
    const std::optional<Fault> fault = next(op);
    if (!fault) return call();
    if (fault->kind == Fault::Kind::lie) return decltype(call())();  // only void calls lie
    if (fault->kind == Fault::Kind::fail_after) call();              // what it returned is lost with the reply
    throw IoError(std::string(op), path, fault->code);
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
  std::string op_;
  uint64_t calls_ = 0;
  bool hit_ = false;
};

// The first half of the bytes of some parts.
std::vector<Bytes> half(std::span<const Bytes> parts) {
  size_t left = 0;
  for (const Bytes& part : parts) left += part.size();
  left /= 2;
  std::vector<Bytes> result;
  for (const Bytes& part : parts) {
    result.push_back(part.first(std::min(part.size(), left)));
    left -= result.back().size();
  }
  return result;
}

class FaultyFile : public File {
 public:
  FaultyFile(std::shared_ptr<Plan> plan, std::unique_ptr<File> inner, std::string path)
      : plan_(std::move(plan)), inner_(std::move(inner)), path_(std::move(path)) {}

  size_t read(uint64_t offset, MutableBytes into) override {
    return plan_->run("read", path_, [&] { return inner_->read(offset, into); });
  }

  void write(uint64_t offset, std::span<const Bytes> parts) override {
    const std::optional<Fault> fault = plan_->next("write");
    if (!fault) return inner_->write(offset, parts);
    if (fault->kind == Fault::Kind::fail_after) inner_->write(offset, parts);
    if (fault->kind == Fault::Kind::partial) inner_->write(offset, half(parts));
    throw IoError("write", path_, fault->code);
  }

  void sync() override {
    plan_->run("sync", path_, [&] { inner_->sync(); });
  }
  uint64_t size() override {
    return plan_->run("size", path_, [&] { return inner_->size(); });
  }
  void truncate(uint64_t size) override {
    plan_->run("truncate", path_, [&] { inner_->truncate(size); });
  }
  bool punch(uint64_t offset, uint64_t length) override {
    return plan_->run("punch", path_, [&] { return inner_->punch(offset, length); });
  }
  std::unique_ptr<Mapping> map(uint64_t length) override {
    return plan_->run("map", path_, [&] { return inner_->map(length); });
  }
  bool linked() override {
    return plan_->run("linked", path_, [&] { return inner_->linked(); });
  }
  std::unique_ptr<Lock> try_lock(bool exclusive) override {
    return plan_->run("lock", path_, [&] { return inner_->try_lock(exclusive); });
  }
  bool locked() override {
    return plan_->run("lock", path_, [&] { return inner_->locked(); });
  }

 private:
  const std::shared_ptr<Plan> plan_;
  const std::unique_ptr<File> inner_;
  const std::string path_;
};

class FaultyStorageImpl : public FaultyStorage {
 public:
  explicit FaultyStorageImpl(std::shared_ptr<Storage> inner) : inner_(std::move(inner)) {}

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    return plan_->run(mode == OpenMode::create ? "create" : "open", shown(path), [&]() -> std::unique_ptr<File> {
      return std::make_unique<FaultyFile>(plan_, inner_->open(path, mode), shown(path));
    });
  }
  std::optional<uint64_t> size(const std::string& path) override {
    return plan_->run("size", shown(path), [&] { return inner_->size(path); });
  }
  std::vector<std::string> list(const std::string& dir) override {
    return plan_->run("list", shown(dir), [&] { return inner_->list(dir); });
  }
  void make_dir(const std::string& dir) override {
    plan_->run("make_dir", shown(dir), [&] { inner_->make_dir(dir); });
  }
  void sync_dir(const std::string& dir) override {
    plan_->run("sync_dir", shown(dir), [&] { inner_->sync_dir(dir); });
  }
  bool remove(const std::string& path) override {
    return plan_->run("remove", shown(path), [&] { return inner_->remove(path); });
  }
  uint64_t free_bytes() override {
    return plan_->run("free_bytes", shown(""), [&] { return inner_->free_bytes(); });
  }
  uint64_t allocated(const std::string& path) override {
    return plan_->run("allocated", shown(path), [&] { return inner_->allocated(path); });
  }
  std::string name() const override { return inner_->name(); }  // asks no device, so it is not a call

  void arm(const Fault& fault) override { plan_->arm(fault); }
  void disarm() override { plan_->disarm(); }
  uint64_t calls() const override { return plan_->calls(); }
  bool hit() const override { return plan_->hit(); }

 private:
  std::string shown(const std::string& path) const { return path.empty() ? name() : name() + "/" + path; }

  const std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
  const std::shared_ptr<Storage> inner_;
};

}  // namespace

std::unique_ptr<FaultyStorage> faulty_storage(std::shared_ptr<Storage> inner) {
  return std::make_unique<FaultyStorageImpl>(std::move(inner));
}

}  // namespace tierload
