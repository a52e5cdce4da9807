// The way of bytes into accelerators' memory: through pinned memory of a thread's own, beside the thread.
#pragma once

#include <array>

#include "tierload/engine.h"

namespace tierload {

// Pinned memory in turn: the next one is free when what was begun from it is done.
class Rooms {
 public:
  // The next one, with at least so many bytes; it waits for it.
  MutableBytes take(uint8_t device, uint64_t bytes);
  // What was begun from the one that was taken last is done at this moment.
  void used(std::shared_ptr<Moment> moment) { rooms_[turn_].used = std::move(moment); }

 private:
  struct Room {
    std::unique_ptr<PinnedMemory> memory;
    std::shared_ptr<Moment> used;
  };
  std::array<Room, 2> rooms_;
  size_t turn_ = 0;
};

class Landing {
 public:
  explicit Landing(const Moments& after = {}) : lanes_(after) {}

  // Begins to copy what stays where it is until settle(), or as long as its room is not taken again.
  void put(const PagePart& part, Bytes from) {
    lanes_.of(part.device).to_device(reinterpret_cast<uint64_t>(part.into.data()), from.data(), from.size());
  }
  // Of everything that was put so far.
  std::shared_ptr<Moment> moment() { return lanes_.moment(); }
  // Returns when everything that was put is there.
  void settle() { lanes_.wait(); }

  Rooms read;     // for bytes as they are stored
  Rooms decoded;  // for pages

 private:
  Lanes lanes_;
};

}  // namespace tierload
