// Splitting and merging of byte planes for several instruction sets; codec/planes.cpp picks one at run time.
#pragma once

// Only C headers here, for the reason that base/xxh_kernels.h gives.
#include <stddef.h>

namespace tierload {

// Items have 2, 4 or 8 bytes; codec/planes.h says what is done with them. Both start at the first item, do as many as
// their blocks allow, and return how many that were.
struct PlaneKernel {
  const char* name;
  size_t (*split)(const unsigned char* raw, size_t items, size_t item_size, bool rotate, unsigned char* const* planes);
  size_t (*merge)(const unsigned char* const* planes, size_t items, size_t item_size, bool rotate, unsigned char* raw);
};

extern const PlaneKernel planes_base;  // plain loops, which do every item
#if defined(__x86_64__)
extern const PlaneKernel planes_avx2;
extern const PlaneKernel planes_avx512bw;
#endif

// Those that this processor has, the fastest last; `count` of them.
const PlaneKernel* const* plane_kernels_here(size_t* count);

// All items: what the kernel leaves over, the plain loops do.
void split_items(const PlaneKernel& kernel, const unsigned char* raw, size_t items, size_t item_size, bool rotate,
                 unsigned char* const* planes);
void merge_items(const PlaneKernel& kernel, const unsigned char* const* planes, size_t items, size_t item_size,
                 bool rotate, unsigned char* raw);

}  // namespace tierload
