#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <thread>

#include "accelerator/kinds.h"
#include "accelerator/pinned.h"
#include "tierload/digest.h"
#include "tierload/error.h"

namespace tierload {
namespace {

// Work that is done in order, by a thread of its own or (`at_once`) by who gives it. Shared by a lane and its moments.
class Queue {
 public:
  explicit Queue(bool at_once) {
    if (!at_once) thread_ = std::thread([this] { work(); });
  }
  ~Queue() {
    if (!thread_.joinable()) return;
    if (owner_ != ::getpid()) {
      thread_.detach();  // it did not come along
      return;
    }
    {
      const std::lock_guard guard(mutex_);
      ends_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  void add(std::function<void()> piece) {
    if (!thread_.joinable()) return piece();
    const std::lock_guard guard(mutex_);
    pieces_.push_back(std::move(piece));
    ++begun_;
    changed_.notify_all();
  }
  uint64_t begun() {
    const std::lock_guard guard(mutex_);
    return begun_;
  }
  bool done(uint64_t count) {
    const std::lock_guard guard(mutex_);
    if (!error_.empty()) throw AcceleratorError(error_);
    return done_ >= count;
  }
  void wait(uint64_t count) {
    std::unique_lock guard(mutex_);
    changed_.wait(guard, [&] { return done_ >= count || !error_.empty(); });
    if (!error_.empty()) throw AcceleratorError(error_);
  }

 private:
  void work() {
    std::unique_lock guard(mutex_);
    while (true) {
      changed_.wait(guard, [&] { return ends_ || !pieces_.empty(); });
      if (pieces_.empty()) return;
      const auto piece = std::move(pieces_.front());
      pieces_.pop_front();
      guard.unlock();
      std::string problem;
      try {
        piece();
      } catch (const AcceleratorError& error) {
        problem = error.what();
      }
      guard.lock();
      if (error_.empty()) error_ = problem;
      ++done_;
      changed_.notify_all();
    }
  }

  const int owner_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> pieces_;
  uint64_t begun_ = 0;
  uint64_t done_ = 0;
  std::string error_;
  bool ends_ = false;
  std::thread thread_;
};

class FakeMoment : public Moment {
 public:
  FakeMoment(std::shared_ptr<Queue> queue, uint64_t count) : queue_(std::move(queue)), count_(count) {}
  bool passed() override { return queue_->done(count_); }
  void wait() override { queue_->wait(count_); }

 private:
  const std::shared_ptr<Queue> queue_;
  const uint64_t count_;
};

class Fake : public FakeAccelerator {
 public:
  explicit Fake(uint8_t number) : number_(number) {}
  std::string name() const override { return "a fake accelerator"; }
  uint8_t number() const override { return number_; }
  std::unique_ptr<PinnedMemory> pin(uint64_t bytes) override { return pool_.take(bytes); }
  std::unique_ptr<Lane> lane() override;
  std::unique_ptr<Lane> lane_of(uint64_t stream) override;
  uint64_t bytes_to_host() const override { return to_host; }
  uint64_t bytes_to_device() const override { return to_device; }
  MutableBytes allocate(uint64_t bytes) override {
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    const std::lock_guard guard(mutex_);
    blocks_.push_back({static_cast<std::byte*>(at), bytes});
    return blocks_.back();
  }
  void delay(double seconds) override { delay_ = seconds; }
  void fail_after(int64_t count) override { left_ = count; }

  bool holds(uint64_t address) {
    const std::lock_guard guard(mutex_);
    return std::ranges::any_of(blocks_, [&](MutableBytes block) {
      const auto begin = reinterpret_cast<uint64_t>(block.data());
      return begin <= address && address < begin + block.size();
    });
  }
  // Before each piece of work.
  void spend(bool at_once) {
    if (!at_once && delay_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay_.load()));
    if (left_ >= 0 && left_-- == 0) throw AcceleratorError("the fake accelerator fails, as it was told");
  }

  std::atomic<uint64_t> to_host{0};
  std::atomic<uint64_t> to_device{0};

 private:
  const uint8_t number_;
  PinnedPool pool_{[](uint64_t bytes) { return static_cast<std::byte*>(std::aligned_alloc(4096, bytes)); },
                   [](std::byte* at) { std::free(at); }};
  std::mutex mutex_;
  std::vector<MutableBytes> blocks_;
  std::atomic<double> delay_{0};
  std::atomic<int64_t> left_{-1};
};

class FakeLane : public Lane {
 public:
  FakeLane(Fake& of, bool at_once) : of_(of), at_once_(at_once), queue_(std::make_shared<Queue>(at_once)) {}
  void after(const std::shared_ptr<Moment>& moment) override {
    add([moment] { moment->wait(); });
  }
  void to_host(std::byte* into, uint64_t from, uint64_t length) override {
    of_.to_host += length;
    add([=] { std::memcpy(into, reinterpret_cast<const void*>(from), length); });
  }
  void to_device(uint64_t into, const std::byte* from, uint64_t length) override {
    of_.to_device += length;
    add([=] { std::memcpy(reinterpret_cast<void*>(into), from, length); });
  }
  void copy(std::span<const DeviceCopy> copies, std::span<const DeviceCopy> more) override {
    std::vector<DeviceCopy> all(copies.begin(), copies.end());
    all.insert(all.end(), more.begin(), more.end());
    add([kept = std::move(all)] {
      for (const DeviceCopy& one : kept) {
        std::memcpy(reinterpret_cast<void*>(one.into), reinterpret_cast<const void*>(one.from), one.length);
      }
    });
  }
  void digest(std::span<const DeviceRun> runs, uint64_t* leaves) override {
    add([kept = std::vector(runs.begin(), runs.end()), leaves]() mutable {
      for (const DeviceRun& run : kept) {
        Bytes left(reinterpret_cast<const std::byte*>(run.at), run.length);
        while (!left.empty()) {
          const Bytes leaf = left.first(std::min<size_t>(left.size(), page_leaf));
          *leaves++ = xxh3(leaf);
          left = left.subspan(leaf.size());
        }
      }
    });
  }
  std::shared_ptr<Moment> moment() override { return std::make_shared<FakeMoment>(queue_, queue_->begun()); }

 private:
  void add(std::function<void()> piece) {
    queue_->add([&of = of_, at_once = at_once_, work = std::move(piece)] {
      of.spend(at_once);
      work();
    });
  }

  Fake& of_;
  const bool at_once_;
  const std::shared_ptr<Queue> queue_;
};

std::unique_ptr<Lane> Fake::lane() { return std::make_unique<FakeLane>(*this, false); }

std::unique_ptr<Lane> Fake::lane_of(uint64_t /*stream*/) { return std::make_unique<FakeLane>(*this, true); }

std::mutex fakes_mutex;
std::vector<Fake*> fakes;  // as long as the process
std::atomic<bool> any{false};

}  // namespace

FakeAccelerator& fake_accelerator() {
  const std::lock_guard guard(fakes_mutex);
  if (fakes.size() == 255u - first_fake) throw UsageError("there are too many fake accelerators");
  fakes.push_back(new Fake(static_cast<uint8_t>(first_fake + fakes.size())));
  any = true;
  return *fakes.back();
}

Accelerator* find_fake(uint8_t number) {
  const std::lock_guard guard(fakes_mutex);
  const size_t at = number - size_t{first_fake};
  return at < fakes.size() ? fakes[at] : nullptr;
}

uint8_t fake_at(uint64_t address) {
  if (!any) return 0;
  const std::lock_guard guard(fakes_mutex);
  for (Fake* fake : fakes) {
    if (fake->holds(address)) return fake->number();
  }
  return 0;
}

}  // namespace tierload
