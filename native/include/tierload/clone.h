// A copy of pages within the memory of the accelerators that they are in.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <vector>

#include "tierload/engine.h"
#include "tierload/staging.h"

namespace tierload {

// Memory of an accelerator for a clone, and the stream of the framework's in turn with which it is made.
struct CloneRoom {
  uint8_t device = 0;
  uint64_t at = 0;  // on 4 KiB
  uint64_t bytes = 0;
  uint64_t stream = 0;
};

// Every page with a byte in an accelerator's memory, whole, in that of the first one. It is of the moment at which the
// streams come to it, so that nothing which is begun on them later is waited for or changes it: the caller goes on at
// once. Memory in `from` stays valid until wait_done() says true. Any thread may wait.
class Clone {
 public:
  // What is needed of each accelerator.
  static std::vector<CloneRoom> room_of(const PageSet& pages);

  // Begins to copy. Throws UsageError when there is less room than is needed, and AcceleratorError.
  Clone(std::shared_ptr<const PageSet> from, std::span<const CloneRoom> rooms);
  // The same pages again, into the same rooms, now: nothing is planned anew.
  Clone(const Clone& earlier, std::span<const CloneRoom> rooms);
  ~Clone();

  // Where all pages are: those of accelerators in one part each, the others as they were.
  std::span<const PageSource> sources() const { return plan_->sources; }
  bool has(size_t page) const { return device_of(plan_->sources[page]) != 0; }
  bool has_all() const { return plan_->all; }
  // Whether it is made, after up to so much time; a negative one has no end. Throws AcceleratorError.
  bool wait_done(std::chrono::nanoseconds timeout);

 private:
  // A part of a page in other memory than that of the page's accelerator.
  struct Elsewhere {
    SourcePart part;
    uint8_t device = 0;  // of the page
    uint64_t into = 0;
  };
  struct Plan {
    std::shared_ptr<const PageSet> from;
    std::vector<SourcePart> parts;
    std::vector<PageSource> sources;
    std::map<uint8_t, std::vector<DeviceCopy>> copies;
    std::vector<Elsewhere> elsewhere;
    uint64_t elsewhere_bytes = 0;
    bool all = true;
  };
  static std::shared_ptr<const Plan> plan(std::shared_ptr<const PageSet> from, std::span<const CloneRoom> rooms);
  void begin(std::span<const CloneRoom> rooms);
  void begin_or_wait(std::span<const CloneRoom> rooms);
  void settle();

  const std::shared_ptr<const Plan> plan_;
  std::unique_ptr<PinnedMemory> from_host_;       // what pages have of other memory
  std::vector<std::shared_ptr<Moment>> fetched_;  // by other accelerators than those that have the pages
  std::vector<std::shared_ptr<Moment>> moments_;
  const int owner_;  // the process that began it
};

}  // namespace tierload
