// Crash enumeration: runs a workload on the simulated file system, builds what crashes may leave, opens each image with
// the shipped engine, and compares what it finds with what had been acknowledged.
#pragma once

#include <string>

#include "tests/workload.h"

namespace tierload {

struct CrashCounts {
  uint64_t workloads = 0;
  uint64_t images = 0;            // distinct bytes on disk
  uint64_t states = 0;            // distinct (bytes, what must be there)
  uint64_t power_cuts = 0;        // of these: states after a power cut in a workload
  uint64_t recovery_cuts = 0;     // a power cut inside or after the recovery from a power cut
  uint64_t kills = 0;             // a kill, then a recovery, then a power cut inside or after it
  uint64_t readers = 0;           // a kill, then a reader, then a power cut after it has shown something
  uint64_t rots = 0;              // one damaged sector of metadata
  uint64_t lost_copies = 0;       // after a power cut, one copy of a mirrored file is gone or damaged
  uint64_t lost_pairs = 0;        // after a power cut, acknowledged records are damaged in both copies of a journal
  uint64_t histories = 0;         // recoveries whose history was read back to the oldest commit
  uint64_t collections = 0;       // recoveries that went back to every commit, and collected
  uint64_t comparisons = 0;       // recoveries whose image was also opened by a reader
  uint64_t lost = 0;              // an acknowledged or shown commit is gone
  uint64_t future = 0;            // something that never happened is there
  uint64_t false_corruption = 0;  // a crash is reported as corruption, or does not open
  std::string first_failure;
  Coverage coverage;

  uint64_t bad() const { return lost + future + false_corruption; }
  void add(const CrashCounts& other);
};

// One workload. `density` in (0, 1]: the share of power-cut images that are opened.
CrashCounts enumerate_crashes(uint64_t seed, unsigned operations, double density, Mutant mutant);

}  // namespace tierload
