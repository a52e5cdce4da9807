// Pages that arrive in the background, most urgent first, while others use what is there already.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tierload/engine.h"

namespace tierload {

class PageParts;
struct Want;
struct Group;
struct PageScratch;

// The parts of one manifest's pages that are to arrive, sorted by page; each belongs to a unit.
struct ArrivingParts {
  const Manifest* manifest = nullptr;
  std::vector<PagePart> parts;
  std::vector<uint32_t> units;
};

// Units of bytes (tensors, as a rule) that threads of the caller's fetch, verify and decode by urgency. Whoever waits
// for a unit sees all of its bytes, or the error of a page of it that is damaged: never a part. A damaged page is the
// failure of its units alone.
class Arrivals : private FetchOrder {
 public:
  // Unit `i` is fetched in the order of `ranks[i]`, the lowest first. Manifests outlive this. Memory of accelerators is
  // written after `moments` of theirs.
  Arrivals(std::shared_ptr<Storage> storage, std::vector<ArrivingParts> sources, std::vector<uint32_t> ranks,
           unsigned threads, Moments moments = {});
  ~Arrivals() override;

  // Works until everything has arrived, or stop() was called. To be called by as many threads as were announced. What
  // it throws (no descriptors, no memory) ends all arrivals.
  void work();
  // Has no further page fetched. Waits return; what has not arrived never will.
  void stop();
  // Lets go of files and buffers, when everything has arrived and every work() has returned.
  void release();

  // New ranks for units; what is under way stays so.
  void order(std::span<const uint32_t> units, std::span<const uint32_t> ranks);
  // What is left of a unit is fetched next: somebody waits for it.
  void demand(uint32_t unit);
  // Whether a unit has arrived within the time. Throws CorruptPageError when a page of it is damaged.
  bool wait(uint32_t unit, std::chrono::nanoseconds time);
  bool arrived(uint32_t unit) const { return left_[unit].load(std::memory_order_acquire) == 0; }
  // Units that have arrived, or failed, since it was last asked; waits for one. Nothing when there will be no more.
  std::vector<uint32_t> next(std::chrono::nanoseconds time);
  // Units with a damaged page, in the order in which that was found.
  std::vector<std::pair<uint32_t, PageFailure>> failures();

  size_t units() const { return groups_of_.size(); }
  bool over();                                           // nothing more will arrive
  uint64_t bytes() const { return bytes_.load(); }       // raw, of pages that are there
  uint64_t total_bytes() const { return total_bytes_; }  // of all pages
  size_t queued();                                       // calls that are not begun

 private:
  size_t next() override;
  void use(const Fetch::Arrival& arrival, PageScratch& scratch);
  void finish(const Want& want, const std::string& problem);
  void move_to(size_t group, uint64_t key);

  std::shared_ptr<Storage> storage_;
  const unsigned threads_;
  const Moments moments_;
  std::vector<ArrivingParts> sources_;
  std::vector<PagePart> parts_;
  std::vector<uint32_t> units_;  // of parts
  std::vector<std::string> files_;
  std::unique_ptr<PageParts> reader_;
  std::vector<Want> wants_;
  std::vector<Group> groups_;
  std::vector<std::vector<uint32_t>> groups_of_;   // by unit
  std::unique_ptr<std::atomic<uint32_t>[]> left_;  // parts of a unit that have not arrived; never 0 for a failed one
  std::vector<uint8_t> touched_;
  uint64_t total_bytes_ = 0;
  std::atomic<uint64_t> bytes_{0};

  std::once_flag begun_;
  std::unique_ptr<Fetch> fetch_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> keys_;                     // of groups: demanded ones first, then by rank
  std::set<std::pair<uint64_t, uint32_t>> queue_;  // keys and groups that are not begun
  uint64_t demands_ = 0;
  size_t groups_left_ = 0;
  std::vector<uint32_t> news_;
  std::vector<std::pair<uint32_t, PageFailure>> failures_;
  std::vector<uint8_t> failed_;  // by unit
  std::atomic<bool> stopped_{false};
};

}  // namespace tierload
