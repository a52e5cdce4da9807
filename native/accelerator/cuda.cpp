// Accelerators of CUDA's driver.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <thread>

#include "accelerator/driver.h"
#include "accelerator/kinds.h"
#include "accelerator/pinned.h"
#include "accelerator/tiles.h"

namespace tierload::cuda {
namespace {

constexpr char copy_image[] =
#include "accelerator/copy.ptx.inc"
    ;
constexpr char digest_image[] =
#include "accelerator/digest.ptx.inc"
    ;
constexpr unsigned digest_threads = 256;  // eight for each of the leaves of a tile
constexpr unsigned copy_threads = 512;
constexpr size_t one_by_one = 2000;  // copies: a few milliseconds

// The driver's calls work with the context that is current on the thread; the framework's own is put back.
class Current {
 public:
  Current(const Driver& driver, Context context) : driver_(driver) { driver.check(driver.push(context), "cuCtxPush"); }
  ~Current() {
    Context popped;
    driver_.pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
};

// The same where nothing may be thrown: at the end of a thread or a process the driver may be gone.
template <typename Call>
void in_context(const Driver& driver, Context context, const Call& call) {
  if (driver.push(context) != 0) return;
  call();
  Context popped;
  driver.pop(&popped);
}

class CudaMoment : public Moment {
 public:
  CudaMoment(const Driver& driver, Context context, Stream stream) : driver_(driver), context_(context) {
    const Current current(driver, context);
    driver.check(driver.event_create(&event_, event_blocking_sync | event_disable_timing), "cuEventCreate");
    driver.check(driver.event_record(event_, stream), "cuEventRecord");
  }
  ~CudaMoment() override {
    if (owner_ == ::getpid()) in_context(driver_, context_, [this] { driver_.event_destroy(event_); });
  }
  bool passed() override {
    const Current current(driver_, context_);
    const Result result = driver_.event_query(event_);
    if (result == not_ready) return false;
    driver_.check(result, "cuEventQuery");
    return true;
  }
  void wait() override {
    const Current current(driver_, context_);
    driver_.check(driver_.event_synchronize(event_), "cuEventSynchronize");
  }
  Event event() const { return event_; }

 private:
  const Driver& driver_;
  const Context context_;
  Event event_ = nullptr;
  const int owner_ = ::getpid();
};

// Tiles for a kernel: written by the processor, read many times by the accelerator, so copied there.
struct Table {
  std::unique_ptr<PinnedMemory> host;
  Pointer device = 0;
  uint64_t bytes = 0;
  std::shared_ptr<Moment> used;  // until then
};

class Cuda;

class CudaLane : public Lane {
 public:
  CudaLane(Cuda& of, Stream stream, bool own) : of_(of), stream_(stream), own_(own) {}
  ~CudaLane() override;
  void after(const std::shared_ptr<Moment>& moment) override;
  void to_host(std::byte* into, uint64_t from, uint64_t length) override;
  void to_device(uint64_t into, const std::byte* from, uint64_t length) override;
  void copy(std::span<const DeviceCopy> copies, std::span<const DeviceCopy> more) override;
  void digest(std::span<const DeviceRun> runs, uint64_t* leaves) override;
  std::shared_ptr<Moment> moment() override;

 private:
  void launch(Function function, unsigned threads, std::span<const Tile> tiles);

  Cuda& of_;
  const Stream stream_;
  const bool own_;
  const int owner_ = ::getpid();
};

class Cuda : public Accelerator {
 public:
  Cuda(const Driver& driver_of, int ordinal) : driver(driver_of) {
    Device device;
    driver.check(driver.device_get(&device, ordinal), "cuDeviceGet");
    std::array<char, 256> text{};
    driver.check(driver.device_name(text.data(), text.size() - 1, device), "cuDeviceGetName");
    name_ = text.data();
    driver.check(driver.primary_retain(&context, device), "cuDevicePrimaryCtxRetain");
  }

  std::string name() const override { return name_; }
  std::unique_ptr<PinnedMemory> pin(uint64_t bytes) override { return pool_.take(bytes); }
  std::unique_ptr<Lane> lane() override {
    const Current current(driver, context);
    Stream stream;
    driver.check(driver.stream_create(&stream, stream_non_blocking), "cuStreamCreate");
    return std::make_unique<CudaLane>(*this, stream, true);
  }
  std::unique_ptr<Lane> lane_of(uint64_t stream) override {
    return std::make_unique<CudaLane>(*this, reinterpret_cast<Stream>(stream), false);
  }
  uint64_t bytes_to_host() const override { return to_host; }
  uint64_t bytes_to_device() const override { return to_device; }

  // One that nobody uses any more, with room for so many bytes.
  Table take_table(uint64_t bytes) {
    {
      const std::lock_guard guard(mutex_);
      for (auto table = tables_.begin(); table != tables_.end(); ++table) {
        if (table->bytes < bytes || !table->used->passed()) continue;
        Table found = std::move(*table);
        tables_.erase(table);
        return found;
      }
    }
    Table table;
    table.host = pin(bytes);
    table.bytes = table.host->memory().size();
    const Current current(driver, context);
    if (driver.alloc(&table.device, table.bytes) != 0) {  // others have all of its memory: it reads the host's
      table.device = reinterpret_cast<Pointer>(table.host->memory().data());
    }
    return table;
  }
  void give_table(Table table) {
    const std::lock_guard guard(mutex_);
    tables_.push_back(std::move(table));
  }

  Function digest_kernel() { return digest_.of(*this, digest_image, "tierload_digest"); }
  Function copy_kernel() { return copy_.of(*this, copy_image, "tierload_copy"); }
  // If not, it is from now on being translated.
  bool copy_kernel_is_there() {
    std::call_once(asked_, [this] {
      std::thread([this] {
        try {
          copy_kernel();
        } catch (const AcceleratorError&) {
          return;  // whoever needs it meets the same
        }
        copy_is_there_ = true;
      }).detach();
    });
    return copy_is_there_;
  }

  const Driver& driver;
  Context context = nullptr;
  std::atomic<uint64_t> to_host{0};
  std::atomic<uint64_t> to_device{0};

 private:
  std::byte* allocate(uint64_t bytes) {
    const Current current(driver, context);
    void* at = nullptr;
    driver.check(driver.host_alloc(&at, bytes, host_portable), "cuMemHostAlloc");
    return static_cast<std::byte*>(at);
  }
  // Translated by the driver when it is first needed, which takes a tenth of a second for the larger one.
  class Kernel {
   public:
    Function of(Cuda& cuda, const char* image, const char* name) {
      std::call_once(loaded_, [&] {
        const Current current(cuda.driver, cuda.context);
        Module module;
        cuda.driver.check(cuda.driver.module_load(&module, image), "cuModuleLoadData");
        cuda.driver.check(cuda.driver.module_function(&function_, module, name), "cuModuleGetFunction");
      });
      return function_;
    }

   private:
    std::once_flag loaded_;
    Function function_ = nullptr;
  };

  std::string name_;
  PinnedPool pool_{[this](uint64_t bytes) { return allocate(bytes); },
                   [this](std::byte* at) { in_context(driver, context, [&] { driver.host_free(at); }); }};
  Kernel digest_;
  Kernel copy_;
  std::once_flag asked_;
  std::atomic<bool> copy_is_there_{false};
  std::mutex mutex_;
  std::deque<Table> tables_;
};

CudaLane::~CudaLane() {
  if (!own_ || owner_ != ::getpid()) return;
  in_context(of_.driver, of_.context, [this] {
    of_.driver.stream_synchronize(stream_);
    of_.driver.stream_destroy(stream_);
  });
}

void CudaLane::after(const std::shared_ptr<Moment>& moment) {
  const Current current(of_.driver, of_.context);
  of_.driver.check(of_.driver.stream_wait(stream_, static_cast<const CudaMoment&>(*moment).event(), 0),
                   "cuStreamWaitEvent");
}

void CudaLane::to_host(std::byte* into, uint64_t from, uint64_t length) {
  const Current current(of_.driver, of_.context);
  of_.driver.check(of_.driver.to_host(into, from, length, stream_), "cuMemcpyDtoHAsync");
  of_.to_host += length;
}

void CudaLane::to_device(uint64_t into, const std::byte* from, uint64_t length) {
  const Current current(of_.driver, of_.context);
  of_.driver.check(of_.driver.to_device(into, from, length, stream_), "cuMemcpyHtoDAsync");
  of_.to_device += length;
}

// Before the kernel is there, few copies are begun one by one: the first clone of a process does not wait for it.
void CudaLane::copy(std::span<const DeviceCopy> copies, std::span<const DeviceCopy> more) {
  if (copies.size() + more.size() > one_by_one || of_.copy_kernel_is_there()) {
    launch(of_.copy_kernel(), copy_threads, copy_tiles(copies, more));
    return;
  }
  const Current current(of_.driver, of_.context);
  for (const std::span<const DeviceCopy> list : {copies, more}) {
    for (const DeviceCopy& one : list) {
      const Result result = of_.driver.copy(one.into, one.from, one.length, stream_);
      if (result == invalid_value) {  // it spans allocations, which a kernel does not mind
        launch(of_.copy_kernel(), copy_threads, copy_tiles(copies, more));
        return;
      }
      of_.driver.check(result, "cuMemcpyAsync");
    }
  }
}

void CudaLane::digest(std::span<const DeviceRun> runs, uint64_t* leaves) {
  launch(of_.digest_kernel(), digest_threads, digest_tiles(runs, leaves));
}

std::shared_ptr<Moment> CudaLane::moment() { return std::make_shared<CudaMoment>(of_.driver, of_.context, stream_); }

void CudaLane::launch(Function function, unsigned threads, std::span<const Tile> tiles) {
  if (tiles.empty()) return;
  const Current current(of_.driver, of_.context);
  Table table = of_.take_table(tiles.size_bytes());
  std::ranges::copy(std::as_bytes(tiles), table.host->memory().begin());
  if (table.device != reinterpret_cast<Pointer>(table.host->memory().data())) {
    of_.driver.check(of_.driver.to_device(table.device, table.host->memory().data(), tiles.size_bytes(), stream_),
                     "cuMemcpyHtoDAsync");
  }
  std::array<void*, 1> parameters{&table.device};
  of_.driver.check(of_.driver.launch(function, static_cast<unsigned>(tiles.size()), 1, 1, threads, 1, 1, 0, stream_,
                                     parameters.data(), nullptr),
                   "cuLaunchKernel");
  table.used = moment();
  of_.give_table(std::move(table));
}

}  // namespace

std::unique_ptr<Accelerator> open_device(int ordinal) {
  const Driver* const driver = Driver::open();
  if (driver == nullptr) throw AcceleratorError(Driver::refusal());
  return std::make_unique<Cuda>(*driver, ordinal);
}

}  // namespace tierload::cuda
