// Which pages are in the store already: raw digest and length -> page.
#pragma once

#include <vector>

#include "tierload/manifest.h"

namespace tierload {

// An open-addressing table of page numbers; the rows stay with their owner.
class PageTable {
 public:
  explicit PageTable(size_t expected) {
    size_t size = 16;
    while (size < expected * 2) size *= 2;
    slots_.assign(size, empty);
  }

  // The entry with these raw bytes, or -1. `row(i)` gives the row of entry i.
  template <typename RowOf>
  int64_t find(const Digest& digest, uint32_t raw_length, RowOf row) const {
    for (size_t at = digest.low & (slots_.size() - 1);; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at] == empty) return -1;
      const PageRow& found = row(slots_[at]);
      if (found.raw_digest == digest && found.raw_length == raw_length) return slots_[at];
    }
  }
  // Never more entries than were expected, so a free slot is always there.
  void insert(const Digest& digest, uint32_t entry) {
    size_t at = digest.low & (slots_.size() - 1);
    while (slots_[at] != empty) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = entry;
  }

 private:
  static constexpr uint32_t empty = 0xFFFFFFFF;
  std::vector<uint32_t> slots_;
};

}  // namespace tierload
