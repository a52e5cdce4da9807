// The raw bytes of pages, wherever they are, for a processor to work with.
#pragma once

#include <vector>

#include "tierload/engine.h"

namespace tierload {

// Room for one page at a time.
class PageBytes {
 public:
  // Where they are when they lie together in the processor's memory; else in this room, until the next call. They are
  // fetched from accelerators through `lanes`, those of the calling thread.
  Bytes of(const PageSource& source, Lanes& lanes);

 private:
  std::vector<std::byte> gathered_;
  std::unique_ptr<PinnedMemory> pinned_;
};

}  // namespace tierload
