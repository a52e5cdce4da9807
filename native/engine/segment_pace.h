// When a segment has to end so that its first byte is durable in time, and how long every segment took.
#pragma once

#include <algorithm>
#include <chrono>

#include "tierload/engine.h"

namespace tierload {

class SegmentPace {
 public:
  using Time = std::chrono::nanoseconds;

  // With an interval of 0 no segment has to end.
  SegmentPace(TimeSource& clock, Time interval) : clock_(clock), interval_(interval) {}

  Time now() const { return clock_.now(); }
  bool bounded() const { return interval_ > Time(0); }
  // The first byte enters.
  void begin() { began_ = now(); }
  // How long the open segment may still take bytes. It always gets a quarter of the interval: where making it durable
  // takes longer than the rest, no segment is in time, and tiny ones would only make it worse.
  Time left() const { return interval_ - std::min(expected_, interval_ / 4 * 3) - (now() - began_); }
  // The open segment is durable; that took since `from`, of which `throttled` was waiting for the cap.
  void end(WriteResult& result, uint64_t bytes, Time from, Time throttled) {
    const Time done = now();
    const Time took = done - from - throttled;
    expected_ = std::max(took, expected_ - (expected_ - took) / 4);  // slow ones count at once, fast ones by and by
    result.times.push_back({bytes, std::chrono::duration<double>(done - began_).count()});
    if (bounded() && done - began_ > interval_) ++result.late_segments;
  }

 private:
  TimeSource& clock_;
  const Time interval_;
  Time began_{0};
  Time expected_{0};  // of making a segment durable
};

}  // namespace tierload
