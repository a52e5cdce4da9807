// Byte planes for every processor: plain loops, which the vectoriser (-O3) turns into what the compiler's flags allow.
#include <stddef.h>

#include "codec/plane_kernels.h"

namespace tierload {
namespace {

// One loop over items, a compile-time number of planes, and the promise that nothing overlaps.
#if defined(__clang__)
#define TIERLOAD_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic ignored "-Wpass-failed"  // builds with sanitizers do not vectorise, and need not
#else
#define TIERLOAD_NO_OVERLAP _Pragma("GCC ivdep")
#endif

using Byte = unsigned char;

template <size_t S, bool rotate>
void split_loop(const Byte* raw, size_t items, Byte* const* planes) {
  Byte* out[S];
  for (size_t p = 0; p < S; ++p) out[p] = planes[p];
  TIERLOAD_NO_OVERLAP
  for (size_t i = 0; i < items; ++i) {
    for (size_t p = 0; p + 2 < S; ++p) out[p][i] = raw[i * S + p];
    const Byte low = raw[i * S + S - 2];
    const Byte high = raw[i * S + S - 1];
    if constexpr (rotate) {
      out[S - 2][i] = static_cast<Byte>((low << 1) | (high >> 7));
      out[S - 1][i] = static_cast<Byte>((high << 1) | (low >> 7));
    } else {
      out[S - 2][i] = low;
      out[S - 1][i] = high;
    }
  }
}

template <size_t S, bool rotate>
void merge_loop(const Byte* const* planes, size_t items, Byte* raw) {
  const Byte* in[S];
  for (size_t p = 0; p < S; ++p) in[p] = planes[p];
  TIERLOAD_NO_OVERLAP
  for (size_t i = 0; i < items; ++i) {
    for (size_t p = 0; p + 2 < S; ++p) raw[i * S + p] = in[p][i];
    const Byte low = in[S - 2][i];
    const Byte high = in[S - 1][i];
    if constexpr (rotate) {
      raw[i * S + S - 2] = static_cast<Byte>((low >> 1) | (high << 7));
      raw[i * S + S - 1] = static_cast<Byte>((high >> 1) | (low << 7));
    } else {
      raw[i * S + S - 2] = low;
      raw[i * S + S - 1] = high;
    }
  }
}

template <bool rotate>
void split(const Byte* raw, size_t items, size_t item_size, Byte* const* planes) {
  if (item_size == 2) return split_loop<2, rotate>(raw, items, planes);
  if (item_size == 4) return split_loop<4, rotate>(raw, items, planes);
  split_loop<8, rotate>(raw, items, planes);
}

template <bool rotate>
void merge(const Byte* const* planes, size_t items, size_t item_size, Byte* raw) {
  if (item_size == 2) return merge_loop<2, rotate>(planes, items, raw);
  if (item_size == 4) return merge_loop<4, rotate>(planes, items, raw);
  merge_loop<8, rotate>(planes, items, raw);
}

size_t split_all(const Byte* raw, size_t items, size_t item_size, bool rotate, Byte* const* planes) {
  rotate ? split<true>(raw, items, item_size, planes) : split<false>(raw, items, item_size, planes);
  return items;
}

size_t merge_all(const Byte* const* planes, size_t items, size_t item_size, bool rotate, Byte* raw) {
  rotate ? merge<true>(planes, items, item_size, raw) : merge<false>(planes, items, item_size, raw);
  return items;
}

}  // namespace

extern const PlaneKernel planes_base = {"base", split_all, merge_all};

}  // namespace tierload
