#include "codec/planes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "codec/layout.h"
#include "codec/plane_kernels.h"

namespace tierload {
namespace {

using Byte = unsigned char;

struct Here {
  std::array<const PlaneKernel*, 3> kernels = {&planes_base};
  size_t count = 1;

  Here() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) kernels[count++] = &planes_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) kernels[count++] = &planes_avx512bw;
#endif
  }
};

const Here& here() {
  static const Here found;
  return found;
}

const PlaneKernel& kernel() { return *here().kernels[here().count - 1]; }

}  // namespace

const PlaneKernel* const* plane_kernels_here(size_t* count) {
  *count = here().count;
  return here().kernels.data();
}

void split_items(const PlaneKernel& with, const Byte* raw, size_t items, size_t item_size, bool rotate,
                 Byte* const* planes) {
  const size_t done = with.split(raw, items, item_size, rotate, planes);
  if (done == items) return;
  std::array<Byte*, item_size_max> rest;
  for (size_t p = 0; p < item_size; ++p) rest[p] = planes[p] + done;
  planes_base.split(raw + done * item_size, items - done, item_size, rotate, rest.data());
}

void merge_items(const PlaneKernel& with, const Byte* const* planes, size_t items, size_t item_size, bool rotate,
                 Byte* raw) {
  const size_t done = with.merge(planes, items, item_size, rotate, raw);
  if (done == items) return;
  std::array<const Byte*, item_size_max> rest;
  for (size_t p = 0; p < item_size; ++p) rest[p] = planes[p] + done;
  planes_base.merge(rest.data(), items - done, item_size, rotate, raw + done * item_size);
}

void split_planes(Bytes raw, bool rotate, std::span<std::byte* const> planes) {
  if (raw.empty()) return;
  if (planes.size() == 1) {
    std::memcpy(planes[0], raw.data(), raw.size());
    return;
  }
  std::array<Byte*, item_size_max> out;
  for (size_t p = 0; p < planes.size(); ++p) out[p] = reinterpret_cast<Byte*>(planes[p]);
  split_items(kernel(), reinterpret_cast<const Byte*>(raw.data()), raw.size() / planes.size(), planes.size(), rotate,
              out.data());
}

void merge_planes(std::span<const PlaneSource> planes, bool rotate, MutableBytes raw) {
  if (raw.empty()) return;
  if (planes.size() == 1) {
    if (planes[0].bytes == nullptr) {
      std::memset(raw.data(), std::to_integer<int>(planes[0].constant), raw.size());
    } else if (planes[0].bytes != raw.data()) {
      std::memcpy(raw.data(), planes[0].bytes, raw.size());
    }
    return;
  }
  // A constant plane is read from one block that stays in the first-level cache, again and again.
  constexpr size_t block_items = 2048;
  std::array<std::array<Byte, block_items>, item_size_max> constants;
  std::array<const Byte*, item_size_max> in;
  std::array<size_t, item_size_max> step;
  for (size_t p = 0; p < planes.size(); ++p) {
    const bool constant = planes[p].bytes == nullptr;
    if (constant) constants[p].fill(std::to_integer<Byte>(planes[p].constant));
    in[p] = constant ? constants[p].data() : reinterpret_cast<const Byte*>(planes[p].bytes);
    step[p] = constant ? 0 : block_items;
  }
  Byte* out = reinterpret_cast<Byte*>(raw.data());
  for (size_t left = raw.size() / planes.size(); left != 0;) {
    const size_t items = std::min(left, block_items);
    merge_items(kernel(), in.data(), items, planes.size(), rotate, out);
    for (size_t p = 0; p < planes.size(); ++p) in[p] += step[p];
    out += items * planes.size();
    left -= items;
  }
}

}  // namespace tierload
