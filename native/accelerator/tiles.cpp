#include "accelerator/tiles.h"

#include <algorithm>

#include "tierload/digest.h"

namespace tierload {
namespace {

constexpr uint64_t copy_bytes = 512u << 10;
constexpr uint64_t digest_bytes = 32 * page_leaf;

}  // namespace

std::vector<Tile> copy_tiles(std::span<const DeviceCopy> copies, std::span<const DeviceCopy> more) {
  std::vector<Tile> tiles;
  for (const std::span<const DeviceCopy> list : {copies, more}) {
    for (const DeviceCopy& copy : list) {
      for (uint64_t at = 0; at < copy.length; at += copy_bytes) {
        tiles.push_back({copy.from + at, copy.into + at, std::min(copy_bytes, copy.length - at)});
      }
    }
  }
  return tiles;
}

std::vector<Tile> digest_tiles(std::span<const DeviceRun> runs, const uint64_t* leaves) {
  std::vector<Tile> tiles;
  for (const DeviceRun& run : runs) {
    for (uint64_t at = 0; at < run.length; at += digest_bytes) {
      const uint64_t length = std::min(digest_bytes, run.length - at);
      tiles.push_back({run.at + at, reinterpret_cast<uint64_t>(leaves), length});
      leaves += (length + page_leaf - 1) / page_leaf;
    }
  }
  return tiles;
}

}  // namespace tierload
