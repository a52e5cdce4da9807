// A copy of a state as it was at one moment, in memory of the store's own, from which it is written while training goes
// on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tierload/engine.h"

namespace tierload {

class Clone;
class PageBytes;

// Memory that is touched before it is needed and used again and again: fresh pages cost many times as much as the copy.
// A forked child does not get it, so that a fork makes no later copy slower; there, the object is a shell.
class Arena {
 public:
  // Throws std::bad_alloc.
  explicit Arena(uint64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  MutableBytes memory() const { return {memory_, bytes_}; }
  // Touches every page with some threads; until it returns, the arena works all the same. Once is enough.
  void prefault(unsigned threads);

 private:
  std::byte* memory_ = nullptr;
  uint64_t bytes_;
  const int owner_;  // the process that has the memory
};

// Pages to be saved, with everything that describes where they are.
struct PageSet {
  std::vector<StridedView> views;
  std::vector<SourcePart> parts;
  std::vector<PageSource> sources;  // in the order in which they are placed
  std::vector<uint32_t> order;      // which page of the manifest each one is; empty: the first is the first

  // What is known of each source, as what is known of each page.
  template <typename T>
  std::vector<T> by_page(std::vector<T> by_source) const {
    if (order.empty()) return by_source;
    std::vector<T> pages(by_source.size());
    for (size_t i = 0; i < order.size(); ++i) pages[order[i]] = by_source[i];
    return pages;
  }
};

// Copies pages into an arena, in two parts: some before the caller goes on, the rest beside it.
//
// With an arena for all of them, every page has a place of its own and stays until the end. A smaller one is filled in
// waves: pages are copied in their order, and each takes the place of some that were written and released. What must
// not change later still has places of its own, if half of the arena is enough for it.
//
// Pages that a clone has are not copied: their bytes are there when the clone is. Other bytes of accelerators' memory
// are fetched by whoever copies, through pinned memory.
//
// Threads: copy_now() and start() come first, on one thread; after that every call may come from any thread. Addresses
// in `from` stay valid until wait_done() says true. In a forked child it can be destroyed, and nothing else.
class Staging : public PageGate {
 public:
  // `late` has one byte a page: 1 for those that may be copied after copy_now(). What accelerators have is fetched
  // after `moments` of theirs. Throws UsageError when the arena is smaller than twice the largest page.
  Staging(std::shared_ptr<const PageSet> from, std::span<const uint8_t> late, std::shared_ptr<Arena> arena,
          std::shared_ptr<Clone> clone = nullptr, Moments moments = {});
  ~Staging() override;

  // What an arena needs to hold all pages at once; `cloned`: but those that a clone would have.
  static uint64_t bytes_of(const PageSet& pages, bool cloned = false);

  // Where the copies are, in the order of the pages that they were made from.
  std::span<const PageSource> sources() const;
  // Copies what must not change later, with the caller and up to `threads` - 1 others. In waves it waits for the
  // writer.
  void copy_now(unsigned threads);
  // Begins to copy the rest on a thread of its own, at low priority.
  void start();
  // Copies the rest with the caller and others, and returns when everything is copied. Someone needs it now.
  void help(unsigned threads);
  // Whether everything is copied, or will never be, and nobody reads from the state any more. Waits up to `timeout`; a
  // negative one has no end.
  bool wait_done(std::chrono::nanoseconds timeout);
  // Whether every page was copied here.
  bool complete() const { return copied_ == order_.size(); }
  // Ends everybody's waiting: the pages that are not copied yet never will be. Called at the end of each save, too: the
  // thread that start() made is over when it returns, and its stack is free.
  void abandon();
  // Whether every page is still here, for another attempt to write it.
  bool keeps_all() const { return whole_; }

  const PageSet& pages() const { return *from_; }
  uint64_t raw_bytes() const { return raw_bytes_; }
  uint64_t copied_bytes() const { return copied_bytes_; }

  void wait(size_t page) override;
  void release(size_t end) override;
  size_t reach() const override { return reach_; }

 private:
  uint64_t place(size_t page) const;  // in the arena
  void put(size_t page, uint64_t at, size_t after);
  void copy_until(size_t end);
  bool copy_next(size_t end, PageBytes& bytes, Lanes& lanes);
  bool cloned(size_t page) const;
  void with_others(unsigned threads, size_t end);

  const std::shared_ptr<const PageSet> from_;
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<Clone> clone_;  // null: there is none
  const Moments moments_;
  std::vector<uint32_t> order_;  // pages, in the order in which they are copied
  size_t now_ = 0;               // so many of them before the caller goes on
  std::vector<size_t> after_;    // by page: so many pages have to be released before its place is free
  std::vector<SourcePart> parts_;
  std::vector<PageSource> sources_;
  bool whole_ = true;  // there is room for all
  size_t reach_ = 0;
  uint64_t raw_bytes_ = 0;

  std::atomic<size_t> next_{0};  // in order_
  std::atomic<size_t> copied_{0};
  std::atomic<uint64_t> copied_bytes_{0};
  std::vector<std::atomic<uint8_t>> ready_;
  struct Waiting {
    std::mutex mutex;
    std::condition_variable changed;
    std::thread late;
  };
  std::unique_ptr<Waiting> waiting_ = std::make_unique<Waiting>();
  std::mutex& mutex_ = waiting_->mutex;  // of what follows, and for changes of what stands before
  std::condition_variable& changed_ = waiting_->changed;
  std::thread& late_ = waiting_->late;
  bool abandoned_ = false;
  std::exception_ptr error_;  // of a copy
  size_t copying_ = 0;        // pages that a thread is at
  size_t released_ = 0;
  const int owner_;  // the process that has the threads
};

}  // namespace tierload
