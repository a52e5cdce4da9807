// XXH3 compiled for several instruction sets; base/digest.cpp picks one at run time.
#pragma once

// Only C headers here: the kernels' files are compiled for newer processors, and an inline function of the C++
// library that came out of one of them could be the copy that the linker keeps for everybody.
#include <stddef.h>
#include <stdint.h>

namespace tierload {

struct XxhKernel {
  uint64_t (*hash64)(const void* data, size_t size);
  void (*hash128)(const void* data, size_t size, uint64_t out[2]);                       // low, high
  void (*tree)(const void* data, size_t size, size_t leaf, uint64_t out[2]);             // tree(data, leaf)
  void (*root)(const uint64_t* leaves, size_t count, uint64_t length, uint64_t out[2]);  // its last step
};

extern const XxhKernel xxh_base;  // what the compiler's own flags allow: SSE2, NEON or plain C
#if defined(__x86_64__)
extern const XxhKernel xxh_avx2;
extern const XxhKernel xxh_avx512;
#endif

}  // namespace tierload
