#include "tierload/pace.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>

#include "tierload/bytes.h"
#include "tierload/error.h"

namespace tierload {
namespace {

using std::chrono::nanoseconds;

constexpr uint64_t burst_bytes_max = 8u << 20;
constexpr double burst_seconds_max = 0.1;

class SteadyClock : public TimeSource {
 public:
  nanoseconds now() override { return std::chrono::steady_clock::now().time_since_epoch(); }
  void sleep(nanoseconds time) override { std::this_thread::sleep_for(time); }
};

double checked(double rate) {
  if (!std::isfinite(rate) || rate < 1) {
    throw UsageError("a cap of " + std::to_string(rate) + " bytes a second makes no sense; it is at least 1");
  }
  return rate;
}

uint64_t burst_of(double rate) {
  const auto bytes = static_cast<uint64_t>(std::min(rate * burst_seconds_max, double{burst_bytes_max}));
  return std::max(bytes / sector, uint64_t{1}) * sector;
}

}  // namespace

TimeSource& steady_time() {
  static SteadyClock clock;
  return clock;
}

void check_cancelled(const std::atomic<bool>* cancelled) {
  if (cancelled && *cancelled) {
    throw CancelledError("the save was cancelled before it was committed; nothing of it is kept");
  }
}

TokenBucket::TokenBucket(double bytes_per_second, TimeSource& clock)
    : rate_(checked(bytes_per_second)),
      burst_(burst_of(rate_)),
      burst_time_(static_cast<int64_t>(static_cast<double>(burst_) / rate_ * 1e9)),
      clock_(clock),
      full_at_(clock.now()) {}

// Rounded up, and what may be ahead of time down, so that rounding never lets more pass.
nanoseconds TokenBucket::cost(uint64_t bytes) const {
  return nanoseconds(static_cast<int64_t>(std::ceil(static_cast<double>(bytes) / rate_ * 1e9)));
}

nanoseconds TokenBucket::take(uint64_t bytes, const std::atomic<bool>* cancelled) {
  const nanoseconds start = clock_.now();
  nanoseconds until;
  {
    const std::lock_guard guard(mutex_);
    full_at_ = std::max(full_at_, start) + cost(bytes);
    until = full_at_ - burst_time_;
  }
  nanoseconds now = start;
  while (now < until) {
    check_cancelled(cancelled);
    clock_.sleep(std::min<nanoseconds>(until - now, cancel_poll));
    now = clock_.now();
  }
  return now - start;
}

nanoseconds TokenBucket::wait_of(uint64_t bytes) {
  const nanoseconds now = clock_.now();
  const std::lock_guard guard(mutex_);
  return std::max(std::max(full_at_, now) + cost(bytes) - burst_time_ - now, nanoseconds(0));
}

}  // namespace tierload
