// What lies under a directory, and how fast it is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tierload {

// Whether its files live in memory (tmpfs, ramfs): to write there is to copy, and there is no device.
bool in_memory(const std::string& directory);

// Why io_uring is refused here, or "".
std::string io_uring_refusal();

// How fast one way of moving data is, in bytes a second: written until durable, and read from the device.
struct DeviceRate {
  bool direct = false;
  uint32_t block_bytes = 0;
  uint32_t depth = 0;
  double write = 0;
  double read = 0;
};
// Tries the page cache and several ways past it, in a directory that is empty, for about `seconds`.
std::vector<DeviceRate> calibrate(const std::string& directory, double seconds);

}  // namespace tierload
