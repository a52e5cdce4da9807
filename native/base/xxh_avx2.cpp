// XXH3 for AVX2. Compile this file with -mavx2 on x86-64; elsewhere it is empty.
#if defined(__x86_64__)
#if !defined(__AVX2__)
#error "base/xxh_avx2.cpp must be compiled with -mavx2"
#endif
#define TIERLOAD_XXH_KERNEL xxh_avx2
#include "base/xxh_kernel.inc"
#endif
