// Making room for others: lower priorities for what saves in the background.
#pragma once

namespace tierload {

// Of the calling thread, for good: 10 nicer than it was, and the last of the ordinary in line for the disk.
void lower_priority();

// The calling thread is the last of the ordinary in line for the disk while this lives. Its claim to a processor stays.
class LowIoPriority {
 public:
  LowIoPriority();
  ~LowIoPriority();
  LowIoPriority(const LowIoPriority&) = delete;
  LowIoPriority& operator=(const LowIoPriority&) = delete;

 private:
  long before_;
};

}  // namespace tierload
