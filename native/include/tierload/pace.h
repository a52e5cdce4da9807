// How fast and how steadily bytes are written: a clock that tests can replace, and a cap on bytes a second.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace tierload {

class TimeSource {
 public:
  virtual ~TimeSource() = default;
  // Since some instant of its own; never goes back.
  virtual std::chrono::nanoseconds now() = 0;
  virtual void sleep(std::chrono::nanoseconds time) = 0;
};
// The system's, which runs on whatever happens to the date. Safe for threads.
TimeSource& steady_time();

// What a save looks at while it waits, so that it can be cancelled soon.
constexpr std::chrono::milliseconds cancel_poll{20};
// Throws CancelledError once `cancelled` (null: never) is true.
void check_cancelled(const std::atomic<bool>* cancelled);

// Lets bytes pass at a rate: in any window of time, no more than the rate allows, and one burst. Safe for threads,
// which are served in the order in which they come.
class TokenBucket {
 public:
  // Throws UsageError unless the rate is finite and at least one byte a second. The clock outlives the bucket.
  explicit TokenBucket(double bytes_per_second, TimeSource& clock = steady_time());

  // The most that may be handed on at once: a tenth of a second's bytes in whole blocks of 4 KiB, from one block to
  // 8 MiB.
  uint64_t burst() const { return burst_; }
  // Waits until `bytes`, at most burst(), may be handed on; returns how long it waited. Throws CancelledError, and the
  // bytes then count as taken: whoever came later has waited for them already.
  std::chrono::nanoseconds take(uint64_t bytes, const std::atomic<bool>* cancelled);
  // How long somebody who wants to hand on so many bytes would wait now.
  std::chrono::nanoseconds wait_of(uint64_t bytes);

 private:
  std::chrono::nanoseconds cost(uint64_t bytes) const;
  const double rate_;
  const uint64_t burst_;
  const std::chrono::nanoseconds burst_time_;
  TimeSource& clock_;
  std::mutex mutex_;
  std::chrono::nanoseconds full_at_;  // when the bucket would hold a whole burst again
};

}  // namespace tierload
