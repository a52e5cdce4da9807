// Checksums and digests as docs/FORMAT.md section 3 defines them.
#pragma once

#include <array>
#include <cstdint>

#include "tierload/storage.h"

namespace tierload {

struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
  auto operator<=>(const Digest&) const = default;
};

constexpr size_t page_leaf = 16 * 1024;
constexpr size_t manifest_leaf = 64 * 1024;

// CRC32C; `seed` continues from an earlier value: crc32c(b, crc32c(a)) == crc32c(a followed by b).
// Uses the SSE4.2 instruction when the processor has it.
uint32_t crc32c(Bytes data, uint32_t seed = 0);

uint64_t xxh3(Bytes data);
Digest xxh3_128(Bytes data);

// tree(data, leaf): XXH3-64 of each leaf, XXH3-128 over those and the length.
Digest tree_digest(Bytes data, size_t leaf);
// The last step of the tree alone, for callers that have the leaves' digests.
Digest tree_root(std::span<const uint64_t> leaves, uint64_t length);

}  // namespace tierload
