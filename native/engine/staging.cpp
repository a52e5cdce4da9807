#include "tierload/staging.h"

#include <unistd.h>

#include <algorithm>

#include "engine/gather.h"
#include "engine/page_bytes.h"
#include "engine/priority.h"
#include "engine/stream.h"
#include "tierload/bytes.h"
#include "tierload/clone.h"
#include "tierload/error.h"

namespace tierload {
namespace {

constexpr uint64_t place_alignment = 4096;
constexpr uint64_t little_bytes = 2u << 20;  // copied in the time that a thread takes to start

uint64_t bytes_of_page(const PageSource& source) {
  uint64_t bytes = 0;
  for (const SourcePart& part : source.parts) bytes += part.length;
  return bytes;
}

uint64_t room_of(const PageSource& source) { return round_up(bytes_of_page(source), place_alignment); }

bool on_device(const PageSource& source) {
  return std::ranges::any_of(source.parts, [](const SourcePart& part) { return part.device != 0; });
}

// What accelerators have comes through pinned memory, which the arena is not.
void copy_page(const PageSource& source, MutableBytes into, PageBytes& bytes, Lanes& lanes) {
  if (on_device(source)) {
    stream_copy(into.data(), bytes.of(source, lanes).data(), into.size());
    return;
  }
  for (const SourcePart& part : source.parts) {
    if (part.view) {
      gather(*part.view, part.base, part.from, into.first(part.length));
    } else {
      stream_copy(into.data(), part.base, part.length);
    }
    into = into.subspan(part.length);
  }
}

}  // namespace

uint64_t Staging::bytes_of(const PageSet& pages, bool cloned) {
  uint64_t total = 0;
  for (const PageSource& source : pages.sources) total += cloned && on_device(source) ? 0 : room_of(source);
  return total;
}

Staging::Staging(std::shared_ptr<const PageSet> from, std::span<const uint8_t> late, std::shared_ptr<Arena> arena,
                 std::shared_ptr<Clone> clone, Moments moments)
    : from_(std::move(from)),
      arena_(std::move(arena)),
      clone_(std::move(clone)),
      moments_(std::move(moments)),
      ready_(from_->sources.size()),
      owner_(::getpid()) {
  const std::vector<PageSource>& pages = from_->sources;
  if (late.size() != pages.size()) throw UsageError("`late` has to say something of each page");
  if (clone_ && clone_->has_all()) {  // nothing is copied here
    for (const PageSource& source : pages) raw_bytes_ += bytes_of_page(source);
    copied_bytes_ = raw_bytes_;
    reach_ = pages.size();
    return;
  }
  const uint64_t room = arena_->memory().size();
  whole_ = bytes_of(*from_, clone_ != nullptr) <= room;
  after_.resize(pages.size());
  parts_.resize(pages.size());
  uint64_t fixed = 0;  // for pages that are copied now: the caller must not wait until those before them are written
  for (size_t page = 0; page < pages.size(); ++page) fixed += late[page] || cloned(page) ? 0 : room_of(pages[page]);
  const bool apart = whole_ || fixed <= room / 2;
  if (!apart) fixed = 0;
  uint64_t at_fixed = 0;
  uint64_t at = fixed;  // where the next one of the others goes, round and round
  size_t front = 0;     // the first of those whose place nobody has taken over
  std::vector<size_t> others;
  reach_ = pages.size();
  for (size_t page = 0; page < pages.size(); ++page) {
    const uint64_t bytes = room_of(pages[page]);
    raw_bytes_ += bytes_of_page(pages[page]);
    if (cloned(page)) {
      copied_bytes_ += bytes_of_page(pages[page]);
      continue;
    }
    if (apart && !late[page]) {
      put(page, at_fixed, 0);
      at_fixed += bytes;
      continue;
    }
    if (!whole_ && 2 * bytes > room - fixed) throw UsageError("the arena is smaller than two pages");
    const auto taken_over = [&](uint64_t start, uint64_t end) {
      while (front < others.size() && place(others[front]) < end &&
             place(others[front]) + room_of(pages[others[front]]) > start) {
        ++front;
      }
    };
    if (at + bytes > room) {
      taken_over(at, room);
      at = fixed;
    }
    taken_over(at, at + bytes);
    put(page, at, front == 0 ? 0 : others[front - 1] + 1);
    if (after_[page] > 0) reach_ = std::min(reach_, page);
    others.push_back(page);
    at += bytes;
  }
  for (size_t page = 0; page < pages.size(); ++page) {
    if (cloned(page)) {
      sources_.push_back(clone_->sources()[page]);
      continue;
    }
    sources_.push_back(pages[page]);
    sources_.back().parts = std::span(&parts_[page], 1);
    order_.push_back(static_cast<uint32_t>(page));
    if (!late[page]) now_ = order_.size();
  }
  if (apart) {
    const auto rest =
        std::stable_partition(order_.begin(), order_.end(), [&](uint32_t page) { return late[page] == 0; });
    now_ = static_cast<size_t>(rest - order_.begin());
  }
}

// Gives a page its place in the arena, which is free when so many pages were released.
void Staging::put(size_t page, uint64_t at, size_t after) {
  parts_[page] = {arena_->memory().data() + at, bytes_of_page(from_->sources[page]), nullptr, 0};
  after_[page] = after;
}

Staging::~Staging() {
  if (owner_ != ::getpid()) {
    // None of the threads that copied or waited came along: whoever joined them, or waited for the last of them to let
    // go of the condition, would never return.
    static_cast<void>(waiting_.release());
    return;
  }
  abandon();
}

uint64_t Staging::place(size_t page) const {
  return static_cast<uint64_t>(parts_[page].base - arena_->memory().data());
}

std::span<const PageSource> Staging::sources() const {
  return clone_ && clone_->has_all() ? clone_->sources() : sources_;
}

bool Staging::cloned(size_t page) const { return clone_ && clone_->has(page); }

// Copies one page among the first `end` that nobody has taken yet; false when there is none, or no use in it.
bool Staging::copy_next(size_t end, PageBytes& bytes, Lanes& lanes) {
  std::unique_lock guard(mutex_);
  if (next_ >= end || abandoned_) return false;
  const size_t page = order_[next_++];
  changed_.wait(guard, [&] { return released_ >= after_[page] || abandoned_; });
  if (abandoned_) return false;
  ++copying_;
  guard.unlock();
  const MutableBytes into = arena_->memory().subspan(place(page), parts_[page].length);
  try {
    copy_page(from_->sources[page], into, bytes, lanes);
  } catch (const AcceleratorError&) {
    guard.lock();
    if (!error_) error_ = std::current_exception();
    abandoned_ = true;
    --copying_;
    changed_.notify_all();
    return false;
  }
  copied_bytes_ += parts_[page].length;
  guard.lock();
  ready_[page].store(1, std::memory_order_release);
  ++copied_;
  --copying_;
  changed_.notify_all();
  return true;
}

void Staging::copy_until(size_t end) {
  PageBytes bytes;
  Lanes lanes(moments_);
  while (copy_next(end, bytes, lanes)) {
  }
}

void Staging::with_others(unsigned threads, size_t end) {
  std::vector<std::thread> others;
  uint64_t left = 0;
  for (size_t at = next_; at < end && left < little_bytes; ++at) left += parts_[order_[at]].length;
  if (left >= little_bytes) {
    for (unsigned i = 1; i < threads; ++i) others.emplace_back([this, end] { copy_until(end); });
  }
  copy_until(end);
  for (std::thread& other : others) other.join();
  const std::lock_guard guard(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void Staging::copy_now(unsigned threads) { with_others(threads, now_); }

void Staging::start() {
  const std::lock_guard guard(mutex_);
  if (now_ == order_.size() || abandoned_) return;
  late_ = std::thread([this] {
    lower_priority();
    copy_until(order_.size());
  });
}

void Staging::help(unsigned threads) {
  with_others(threads, order_.size());
  wait_done(std::chrono::nanoseconds(-1));  // for what others are copying
}

bool Staging::wait_done(std::chrono::nanoseconds timeout) {
  const auto done = [&] { return complete() || (abandoned_ && copying_ == 0); };
  std::unique_lock guard(mutex_);
  if (timeout.count() >= 0) return changed_.wait_for(guard, timeout, done);
  changed_.wait(guard, done);
  return true;
}

void Staging::abandon() {
  std::thread late;
  {
    const std::lock_guard guard(mutex_);
    abandoned_ = true;
    late.swap(late_);
    changed_.notify_all();
  }
  if (late.joinable()) late.join();
}

void Staging::wait(size_t page) {
  if (cloned(page)) {
    clone_->wait_done(std::chrono::nanoseconds(-1));
    return;
  }
  if (ready_[page].load(std::memory_order_acquire)) return;
  std::unique_lock guard(mutex_);
  changed_.wait(guard, [&] { return ready_[page] || abandoned_; });
  if (ready_[page]) return;
  if (error_) std::rethrow_exception(error_);
  throw CancelledError("the state was not copied to its end");
}

void Staging::release(size_t end) {
  const std::lock_guard guard(mutex_);
  released_ = std::max(released_, end);
  changed_.notify_all();
}

}  // namespace tierload
