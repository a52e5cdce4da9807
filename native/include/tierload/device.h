// What lies under a directory, and how fast it is.
#pragma once

#include <cstdint>
#include <memory>
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

// One way to make small records durable, one at a time, in a new file of its own.
struct RecordWay {
  enum class Flush {
    none,   // not durable: what the write alone costs
    after,  // fdatasync after the write; in a ring, linked to it
    with,   // RWF_DSYNC: the write returns when it is durable
  };
  Flush flush = Flush::after;
  bool grows = false;   // the file grows with each record; else it was filled with zeros before
  bool direct = false;  // past the page cache, a block of 4 KiB or more for each record
  bool ring = false;    // io_uring, with the file and the memory registered
};
class RecordWriter {
 public:
  virtual ~RecordWriter() = default;
  // Nanoseconds that each of the next `count` records took. Throws UsageError beyond those that were announced.
  virtual std::vector<uint64_t> write(uint64_t count) = 0;
};
// Has written a first record already, which counts for nothing. Throws IoError where something refuses this way.
std::unique_ptr<RecordWriter> record_writer(const std::string& path, const RecordWay& way, uint64_t record_bytes,
                                            uint64_t records);

}  // namespace tierload
