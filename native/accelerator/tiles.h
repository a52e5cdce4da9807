// Work for a kernel, cut into tiles: one for each of its blocks.
#pragma once

#include <vector>

#include "tierload/accelerator.h"

namespace tierload {

struct Tile {
  uint64_t from = 0;
  uint64_t into = 0;  // of a digest: where its first leaf's digest goes
  uint64_t length = 0;
};

std::vector<Tile> copy_tiles(std::span<const DeviceCopy> copies, std::span<const DeviceCopy> more = {});
std::vector<Tile> digest_tiles(std::span<const DeviceRun> runs, const uint64_t* leaves);

}  // namespace tierload
