// Digests of docs/FORMAT.md section 3, on the XXH3 kernel that suits this processor.
//
// Per-file flags, on x86-64 only:
//   base/xxh_avx2.cpp    -mavx2
//   base/xxh_avx512.cpp  -mavx512f
#include "tierload/digest.h"

#include <bit>

#include "base/xxh_kernels.h"

namespace tierload {

static_assert(std::endian::native == std::endian::little, "the tree hashes leaf digests as they lie in memory");

namespace {

const XxhKernel& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return xxh_avx512;
  if (__builtin_cpu_supports("avx2")) return xxh_avx2;
#endif
  return xxh_base;
}

const XxhKernel& kernel() {
  static const XxhKernel& chosen = choose();
  return chosen;
}

}  // namespace

uint64_t xxh3(Bytes data) { return kernel().hash64(data.data(), data.size()); }

Digest xxh3_128(Bytes data) {
  uint64_t out[2];
  kernel().hash128(data.data(), data.size(), out);
  return {out[0], out[1]};
}

Digest tree_digest(Bytes data, size_t leaf) {
  uint64_t out[2];
  kernel().tree(data.data(), data.size(), leaf, out);
  return {out[0], out[1]};
}

Digest tree_root(std::span<const uint64_t> leaves, uint64_t length) {
  uint64_t out[2];
  kernel().root(leaves.data(), leaves.size(), length, out);
  return {out[0], out[1]};
}

}  // namespace tierload
