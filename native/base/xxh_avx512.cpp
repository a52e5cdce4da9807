// XXH3 for AVX-512. Compile this file with -mavx512f on x86-64; elsewhere it is empty.
#if defined(__x86_64__)
#if !defined(__AVX512F__)
#error "base/xxh_avx512.cpp must be compiled with -mavx512f"
#endif
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define TIERLOAD_XXH_KERNEL xxh_avx512
#include "base/xxh_kernel.inc"
#endif
