// What a device does: the same files written and read in each of the ways that a store may move them.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>

#include "storage/posix_tree.h"
#include "tierload/device.h"
#include "tierload/error.h"
#include "tierload/storage.h"

namespace tierload {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t step_bytes = 16u << 20;
constexpr DirectOptions candidates[] = {{1u << 20, 4}, {1u << 20, 8}, {2u << 20, 8}, {4u << 20, 4}};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A file that is removed again, whatever happens.
struct Scratch {
  Storage& storage;
  std::string path = "calibration";
  std::unique_ptr<File> file = storage.open(path, OpenMode::create);
  ~Scratch() {
    try {
      storage.remove(path);
    } catch (const IoError&) {
      // The directory is the caller's, who removes it.
    }
  }
};

// Bytes a second until they are durable, and from the device into memory.
DeviceRate measure(Storage& storage, const std::string& directory, const DirectOptions& way, bool direct,
                   double seconds, Bytes bytes) {
  DeviceRate rate{direct, way.block_bytes, way.depth, 0, 0};
  const Scratch scratch{storage};
  uint64_t written = 0;
  auto start = Clock::now();
  {
    const auto appender = storage.append(*scratch.file, scratch.path, step_bytes);
    do {
      appender->append(std::span(&bytes, 1));
      written += bytes.size();
    } while (seconds_since(start) < seconds / 2);
    appender->finish();
    scratch.file->sync();
  }
  rate.write = static_cast<double>(written) / seconds_since(start);
  {  // out of the page cache again
    const posix::Fd fd(::open((directory + "/" + scratch.path).c_str(), O_RDONLY | O_CLOEXEC));
    ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
  std::vector<Fetch::Range> ranges;
  for (uint64_t at = 0; at < written; at += 4u << 20) ranges.push_back({0, at, 4u << 20, nullptr});
  start = Clock::now();
  const auto fetch = storage.fetch({scratch.path}, ranges, 1);
  uint64_t read = 0;
  while (seconds_since(start) < seconds / 2) {
    const auto arrival = fetch->next();
    if (!arrival) break;
    read += arrival->bytes.size();
    fetch->release(*arrival);
  }
  rate.read = static_cast<double>(read) / seconds_since(start);
  return rate;
}

}  // namespace

std::vector<DeviceRate> calibrate(const std::string& directory, double seconds) {
  std::vector<std::byte> bytes(step_bytes);
  std::mt19937_64 random(1);  // a device or file system may compress
  for (size_t i = 0; i < bytes.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  std::vector<DeviceRate> rates;
  const double each = seconds / static_cast<double>(std::size(candidates) + 1);
  const auto plain = posix_storage(directory);
  rates.push_back(measure(*plain, directory, {0, 0}, false, each, bytes));
  try {
    for (const DirectOptions& way : candidates) {
      DirectOptions always = way;
      always.least_bytes = 0;
      rates.push_back(measure(*direct_storage(directory, always), directory, way, true, each, bytes));
    }
  } catch (const UnsupportedError&) {
    // Only the page cache is left.
  }
  return rates;
}

}  // namespace tierload
