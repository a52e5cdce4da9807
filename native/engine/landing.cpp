#include "engine/landing.h"

namespace tierload {

MutableBytes Rooms::take(uint8_t device, uint64_t bytes) {
  turn_ = (turn_ + 1) % rooms_.size();
  Room& room = rooms_[turn_];
  if (room.used) room.used->wait();
  room.used = nullptr;
  if (!room.memory || room.memory->memory().size() < bytes) room.memory = accelerator(device).pin(bytes);
  return room.memory->memory();
}

}  // namespace tierload
