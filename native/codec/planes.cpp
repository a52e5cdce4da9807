#include "codec/planes.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tierload {
namespace {

// The loops below are written for the vectoriser (-O3): one loop over items, a compile-time number of planes, and the
// promise that nothing overlaps. GCC turns the strided side into unpack and pack instructions; plain SSE2 already runs
// at memcpy's speed on pages, so there is no dispatch here.
#if defined(__clang__)
#define TIERLOAD_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic ignored "-Wpass-failed"  // builds with sanitizers do not vectorise, and need not
#else
#define TIERLOAD_NO_OVERLAP _Pragma("GCC ivdep")
#endif

using Byte = unsigned char;

template <size_t S>
using In = std::array<const Byte*, S>;
template <size_t S>
using Out = std::array<Byte*, S>;

template <size_t S, bool rotate>
void split_loop(const Byte* raw, size_t items, const Out<S>& planes) {
  const Out<S> out = planes;
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
void merge_loop(const In<S>& planes, size_t items, Byte* raw) {
  const In<S> in = planes;
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

template <size_t S, bool rotate>
void split(Bytes raw, std::span<std::byte* const> planes) {
  Out<S> out;
  for (size_t p = 0; p < S; ++p) out[p] = reinterpret_cast<Byte*>(planes[p]);
  split_loop<S, rotate>(reinterpret_cast<const Byte*>(raw.data()), raw.size() / S, out);
}

// A constant plane is read from one block that stays in the first-level cache, again and again.
constexpr size_t block_items = 2048;

template <size_t S, bool rotate>
void merge(std::span<const PlaneSource> planes, MutableBytes raw) {
  std::array<std::array<Byte, block_items>, S> constants;
  In<S> in;
  std::array<size_t, S> step;
  for (size_t p = 0; p < S; ++p) {
    const bool constant = planes[p].bytes == nullptr;
    if (constant) constants[p].fill(std::to_integer<Byte>(planes[p].constant));
    in[p] = constant ? constants[p].data() : reinterpret_cast<const Byte*>(planes[p].bytes);
    step[p] = constant ? 0 : block_items;
  }
  Byte* out = reinterpret_cast<Byte*>(raw.data());
  for (size_t left = raw.size() / S; left != 0;) {
    const size_t items = std::min(left, block_items);
    merge_loop<S, rotate>(in, items, out);
    for (size_t p = 0; p < S; ++p) in[p] += step[p];
    out += items * S;
    left -= items;
  }
}

}  // namespace

void split_planes(Bytes raw, bool rotate, std::span<std::byte* const> planes) {
  if (raw.empty()) return;
  switch (planes.size()) {
    case 1:
      std::memcpy(planes[0], raw.data(), raw.size());
      break;
    case 2:
      rotate ? split<2, true>(raw, planes) : split<2, false>(raw, planes);
      break;
    case 4:
      rotate ? split<4, true>(raw, planes) : split<4, false>(raw, planes);
      break;
    default:
      rotate ? split<8, true>(raw, planes) : split<8, false>(raw, planes);
  }
}

void merge_planes(std::span<const PlaneSource> planes, bool rotate, MutableBytes raw) {
  if (raw.empty()) return;
  switch (planes.size()) {
    case 1:
      if (planes[0].bytes == nullptr) {
        std::memset(raw.data(), std::to_integer<int>(planes[0].constant), raw.size());
      } else if (planes[0].bytes != raw.data()) {
        std::memcpy(raw.data(), planes[0].bytes, raw.size());
      }
      break;
    case 2:
      rotate ? merge<2, true>(planes, raw) : merge<2, false>(planes, raw);
      break;
    case 4:
      rotate ? merge<4, true>(planes, raw) : merge<4, false>(planes, raw);
      break;
    default:
      rotate ? merge<8, true>(planes, raw) : merge<8, false>(planes, raw);
  }
}

}  // namespace tierload
