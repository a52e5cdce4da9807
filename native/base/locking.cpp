#include "tierload/locking.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <vector>

#include "tierload/error.h"

namespace tierload {
namespace {

constexpr uint64_t unlimited = std::numeric_limits<uint64_t>::max();
constexpr int ipc_lock_bit = 14;       // CAP_IPC_LOCK of linux/capability.h
constexpr int preferred_policy = 1;    // MPOL_PREFERRED of linux/mempolicy.h
constexpr unsigned lock_on_fault = 1;  // MLOCK_ONFAULT of linux/mman.h, which glibc 2.27 has as well

uint64_t page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

using Interval = std::pair<uint64_t, uint64_t>;  // from an address to the one after the last

// The whole pages of a region.
Interval pages_of(const Region& region) {
  const uint64_t page = page_bytes();
  if (region.length > unlimited - page || region.address > unlimited - page - region.length) {
    throw UsageError("a region of " + std::to_string(region.length) + " bytes from address " +
                     std::to_string(region.address) + " is beyond the end of memory; give addresses and lengths");
  }
  if (region.length == 0) return {region.address, region.address};
  return {region.address / page * page, (region.address + region.length + page - 1) / page * page};
}

std::vector<Interval> pages_of(std::span<const Region> regions) {
  std::vector<Interval> pages;
  pages.reserve(regions.size());
  for (const Region& region : regions) pages.push_back(pages_of(region));
  return pages;
}

// Each byte once, in as few intervals as possible, by address.
std::vector<Interval> merged(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<Interval> whole;
  for (const auto& [start, end] : intervals) {
    if (start == end) continue;
    if (whole.empty() || whole.back().second < start) {
      whole.emplace_back(start, end);
    } else {
      whole.back().second = std::max(whole.back().second, end);
    }
  }
  return whole;
}

uint64_t bytes_of(const std::vector<Interval>& intervals) {
  uint64_t bytes = 0;
  for (const auto& [start, end] : intervals) bytes += end - start;
  return bytes;
}

// The first `room` bytes of intervals in this order, each byte once.
std::vector<Interval> first_of(const std::vector<Interval>& intervals, uint64_t room) {
  std::map<uint64_t, uint64_t> taken;
  for (auto [start, end] : intervals) {
    while (start < end && room > 0) {
      const auto next = taken.upper_bound(start);
      if (next != taken.begin() && std::prev(next)->second > start) {
        start = std::prev(next)->second;
        continue;
      }
      const uint64_t until = std::min(next == taken.end() ? end : std::min(end, next->first), start + room);
      taken.emplace_hint(next, start, until);
      room -= until - start;
      start = until;
    }
  }
  return {taken.begin(), taken.end()};
}

// The value behind `name` in /proc/self/status; empty where there is none.
std::string status_of(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) return line.substr(line.find_first_not_of(" \t", name.size() + 1));
  }
  return {};
}

uint64_t number_of(const std::string& text, int base) {
  return text.empty() ? 0 : std::strtoull(text.c_str(), nullptr, base);
}

// The kernel asks for the capability in the first user namespace, which alone has all users.
bool may_lock_all() {
  std::ifstream map("/proc/self/uid_map");
  uint64_t inside = 1, outside = 1, count = 0;
  map >> inside >> outside >> count;
  const bool first = inside == 0 && outside == 0 && count == std::numeric_limits<uint32_t>::max();
  return first && (number_of(status_of("CapEff"), 16) >> ipc_lock_bit & 1) != 0;
}

std::string in_units(uint64_t bytes) {
  if (bytes >= 1 << 20 && bytes % (1 << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  return std::to_string(bytes >> 10) + " KiB";
}

// How many more bytes this process may lock, and what to say once these are used up.
uint64_t room_to_lock(std::string& reason) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || may_lock_all()) return unlimited;
  const uint64_t locked = number_of(status_of("VmLck"), 10) << 10;  // in KiB
  reason = "the memlock limit of this process, " + in_units(limit.rlim_cur) + ", is reached" +
           (locked > 0 ? " (" + in_units(locked) + " were locked before)" : "") +
           ": raise it (`ulimit -l`, LimitMEMLOCK= of systemd, --ulimit memlock= of docker) or give CAP_IPC_LOCK";
  const uint64_t whole = limit.rlim_cur / page_bytes() * page_bytes();
  return whole - std::min(whole, locked);
}

std::string refusal(int code) {
  switch (code) {
    case ENOMEM:  // the limit was minded
      return "memory is not mapped, somebody locks at the same time, or there are more ranges than vm.max_map_count";
    case EPERM:
      return "this process may not lock memory (RLIMIT_MEMLOCK is 0, or a sandbox forbids it)";
    case ENOSYS:
      return "this kernel or sandbox has no mlock";
    default:
      return std::string("the kernel refused: ") + std::strerror(code);
  }
}

// Locks an interval by `method`, or by mlock from now on where there is no mlock2. Returns 0 or an errno value.
int lock_interval(uint64_t start, uint64_t bytes, std::string& method) {
  if (method != "mlock") {
    if (::syscall(SYS_mlock2, start, bytes, lock_on_fault) == 0) {
      method = "mlock2";
      return 0;
    }
    // A sandbox of before 2015 does not know the call, and answers EPERM.
    if (errno != ENOSYS && errno != EINVAL && errno != EPERM) return errno;
  }
  if (::mlock(reinterpret_cast<const void*>(start), bytes) != 0) return errno;
  method = "mlock";
  return 0;
}

// Returns why it could not be done; empty if it was.
std::string place(const std::vector<Interval>& intervals, uint32_t node) {
  constexpr uint64_t bits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(node / bits + 1);
  mask.back() = 1UL << node % bits;
  for (const auto& [start, end] : intervals) {
    // The kernel reads one bit less than it is told.
    if (::syscall(SYS_mbind, start, end - start, preferred_policy, mask.data(), mask.size() * bits + 1, 0) != 0) {
      return "memory could not be given to node " + std::to_string(node) + ": " + std::strerror(errno);
    }
  }
  return {};
}

}  // namespace

LockReport lock_memory(std::span<const Region> regions, std::optional<uint32_t> node) {
  LockReport report;
  const std::vector<Interval> wanted = pages_of(regions);
  std::vector<Interval> chosen = merged(wanted);
  std::string limited;
  const uint64_t total = bytes_of(chosen), room = room_to_lock(limited);
  if (node) report.placing = place(chosen, *node);
  if (total > room) {
    chosen = merged(first_of(wanted, room));
    report.reason = limited;
  }
  for (const auto& [start, end] : chosen) {
    const int code = lock_interval(start, end - start, report.method);
    if (code == 0) report.locked += end - start;
    if (code != 0) report.reason = refusal(code);
  }
  report.refused = total - report.locked;
  return report;
}

LockReport unlock_memory(std::span<const Region> regions) {
  LockReport report;
  for (const auto& [start, end] : merged(pages_of(regions))) {
    const bool done = ::munlock(reinterpret_cast<const void*>(start), end - start) == 0;
    (done ? report.locked : report.refused) += end - start;
    if (!done) report.reason = errno == ENOMEM ? "memory is not mapped any more" : refusal(errno);
  }
  return report;
}

}  // namespace tierload
