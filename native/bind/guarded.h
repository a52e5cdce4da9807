// Tensors that change only when their owner says so, and whether they kept to it.
#pragma once

#include <vector>

#include "bind/torch.h"
#include "state/leaves.h"

namespace tierload {

// The memory of some tensors, and how often each was changed in place when this was made: torch counts that for
// autograd (`_version`). That memory stays while this lives. Tensors whose elements do not lie together, that have
// fewer than `least_bytes`, or that are in the processor's memory and shared with other processes, are left out.
class GuardedMemory {
 public:
  // An item may be a pair: a tensor that is spread over ranks, and this rank's part of it. Throws what torch throws for
  // a tensor that counts no changes (one of inference mode).
  GuardedMemory(const Torch& torch, const nb::list& tensors, uint64_t least_bytes);

  // Whether each of these ranges lies in that memory whole.
  std::vector<uint8_t> holds(std::span<const uint64_t> starts, std::span<const int64_t> lengths) const;
  // Start and end of each tensor that was changed since, one after the other; also of those whose storage was given
  // other memory, as torch does to share it between processes.
  std::vector<uint64_t> changed() const;

 private:
  struct Guarded {
    nb::object tensor;   // another one over the same memory: `.data = ...` gives the user's own another memory
    nb::object counter;  // the whole that it is this rank's part of, which counts changes too; else None
    MemoryRange range;
    int64_t version;
  };
  int64_t version_of(const nb::object& tensor) const;

  const Torch& torch_;
  std::vector<Guarded> tensors_;
  std::vector<MemoryRange> ranges_;  // sorted; ranges that touch are one
};

void bind_guarded(nb::module_& module);

}  // namespace tierload
