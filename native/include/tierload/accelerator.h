// Accelerators, as far as pages come from their memory or go there. Nothing links against CUDA: its driver is opened
// when memory of it is first met, and where it cannot be, tensors go through the framework's own copies instead.
//
// An accelerator has a number: 0 is the processor, which is none; CUDA's device d is d + 1.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tierload/storage.h"

namespace tierload {

// The numbers that accelerators of tests have from here on.
constexpr uint8_t first_fake = 128;

// Host memory that an accelerator reads and writes by itself, at full speed and beside everybody. Pooled: it goes back
// to where it came from. In a forked child it is not there.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
  virtual MutableBytes memory() const = 0;
};

// A moment of an accelerator's work: all that it had been given up to then.
class Moment {
 public:
  virtual ~Moment() = default;
  virtual bool passed() = 0;
  virtual void wait() = 0;  // on the processor
};

// A run of bytes in an accelerator's memory.
struct DeviceRun {
  uint64_t at = 0;
  uint64_t length = 0;
};

struct DeviceCopy {
  uint64_t from = 0;
  uint64_t into = 0;
  uint64_t length = 0;
};

// Work of an accelerator that is done in the order in which it was begun, beside that of other lanes. For one thread at
// a time. Every call only begins something. What it names stays valid until a later moment has passed, and host memory
// has to be pinned, or copies wait for the processor. Throws AcceleratorError, also for what earlier work has met.
class Lane {
 public:
  virtual ~Lane() = default;  // waits for what was begun
  virtual void after(const std::shared_ptr<Moment>& moment) = 0;
  virtual void to_host(std::byte* into, uint64_t from, uint64_t length) = 0;
  virtual void to_device(uint64_t into, const std::byte* from, uint64_t length) = 0;
  // Copies within the accelerator's memory, all of them at a time; `from` may be pinned memory, too. None overlaps.
  virtual void copy(std::span<const DeviceCopy> copies, std::span<const DeviceCopy> more = {}) = 0;
  // The digests of all leaves (docs/FORMAT.md section 3) of the runs, one run after the other, into pinned memory.
  virtual void digest(std::span<const DeviceRun> runs, uint64_t* leaves) = 0;
  virtual std::shared_ptr<Moment> moment() = 0;  // of all that was begun here so far
  void wait() { moment()->wait(); }
};

// By accelerator: what its work has to come after.
using Moments = std::map<uint8_t, std::shared_ptr<Moment>>;

class Accelerator {
 public:
  virtual ~Accelerator() = default;
  virtual std::string name() const = 0;
  virtual std::unique_ptr<PinnedMemory> pin(uint64_t bytes) = 0;
  virtual std::unique_ptr<Lane> lane() = 0;
  // What the framework gives its stream of this handle, in turn with it. The stream outlives the lane.
  virtual std::unique_ptr<Lane> lane_of(uint64_t stream) = 0;

  // What was moved so far between its memory and the host's, in bytes.
  virtual uint64_t bytes_to_host() const = 0;
  virtual uint64_t bytes_to_device() const = 0;
};

// Pinned memory of this process: held now, most at a time, and what of it is idle is given back to the system.
struct PinnedUse {
  uint64_t bytes = 0;
  uint64_t most = 0;
};
PinnedUse pinned_use();
void trim_pinned();

// Nullptr where it cannot be used; accelerator_refusal() says why, for a person.
Accelerator* find_accelerator(uint8_t number);
std::string accelerator_refusal(uint8_t number);
// The accelerator that a caller knows to be there. Throws AcceleratorError.
Accelerator& accelerator(uint8_t number);

// A stream of the framework's, by its handle.
struct DeviceStream {
  uint8_t device = 0;
  uint64_t stream = 0;
};
// What these streams have been given so far.
Moments moments_of(std::span<const DeviceStream> streams);

// Lanes of one thread, one for each accelerator that it comes to.
class Lanes {
 public:
  explicit Lanes(const Moments& after = {}) : after_(after) {}
  Lane& of(uint8_t device);
  std::shared_ptr<Moment> moment();  // of everything that was begun in them
  // Waits for everything that was begun in them.
  void wait();

 private:
  const Moments after_;
  std::map<uint8_t, std::unique_ptr<Lane>> lanes_;
};

// An accelerator of tests. Its memory is the processor's, and what a lane of it is given is done late, by a thread. The
// framework's streams have done everything when their calls return: so does a lane of one.
class FakeAccelerator : public Accelerator {
 public:
  virtual uint8_t number() const = 0;
  virtual MutableBytes allocate(uint64_t bytes) = 0;  // valid until the end of the process
  virtual void delay(double seconds) = 0;             // before each piece of a lane's work from now on
  virtual void fail_after(int64_t count) = 0;         // so many more pieces of work; a negative number: never
};
FakeAccelerator& fake_accelerator();  // a new one each time
// The number of the fake one whose memory an address is in; 0: none.
uint8_t fake_at(uint64_t address);

}  // namespace tierload
