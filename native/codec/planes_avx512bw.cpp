// Byte planes for AVX-512 F and BW. Compile this file with -mavx512f -mavx512bw on x86-64; elsewhere it is empty.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__)
#error "codec/planes_avx512bw.cpp must be compiled with -mavx512f -mavx512bw"
#endif
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#include <stddef.h>

namespace tierload {
namespace {

alignas(64) const unsigned short order_of_8[32] = {0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                                                   4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};
alignas(64) const unsigned short reorder_of_8[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                     2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};

struct Simd {
  using Vector = __m512i;

  static Vector load(const void* at) { return _mm512_loadu_si512(at); }
  static void store(void* at, Vector v) { _mm512_storeu_si512(at, v); }
  static Vector either(Vector a, Vector b) { return _mm512_or_si512(a, b); }
  template <int bits>
  static Vector left_16(Vector v) {
    return _mm512_slli_epi16(v, bits);
  }
  template <int bits>
  static Vector right_16(Vector v) {
    return _mm512_srli_epi16(v, bits);
  }

  static Vector low_8(Vector v) { return _mm512_and_si512(v, _mm512_set1_epi16(0xFF)); }
  static Vector low_16(Vector v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xFFFF)); }
  static Vector high_16(Vector v) { return _mm512_srli_epi32(v, 16); }
  static Vector narrow_16(Vector a, Vector b) { return _mm512_packus_epi16(a, b); }
  static Vector narrow_32(Vector a, Vector b) { return _mm512_packus_epi32(a, b); }
  static Vector even_32(Vector a, Vector b) { return shuffle_32<0x88>(a, b); }
  static Vector odd_32(Vector a, Vector b) { return shuffle_32<0xDD>(a, b); }

  static Vector zip_low_8(Vector a, Vector b) { return _mm512_unpacklo_epi8(a, b); }
  static Vector zip_high_8(Vector a, Vector b) { return _mm512_unpackhi_epi8(a, b); }
  static Vector zip_low_16(Vector a, Vector b) { return _mm512_unpacklo_epi16(a, b); }
  static Vector zip_high_16(Vector a, Vector b) { return _mm512_unpackhi_epi16(a, b); }
  static Vector zip_low_32(Vector a, Vector b) { return _mm512_unpacklo_epi32(a, b); }
  static Vector zip_high_32(Vector a, Vector b) { return _mm512_unpackhi_epi32(a, b); }

  // Unit S·l + k, the k-th of lane l, goes to 4·k + l; reorder() is the way back.
  template <size_t S>
  static Vector order(Vector v) {
    if constexpr (S == 2) return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
    if constexpr (S == 4) {
      return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    }
    return _mm512_permutexvar_epi16(load(order_of_8), v);
  }
  template <size_t S>
  static Vector reorder(Vector v) {
    if constexpr (S == 2) return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), v);
    if constexpr (S == 4) {
      return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    }
    return _mm512_permutexvar_epi16(load(reorder_of_8), v);
  }

 private:
  template <int which>
  static Vector shuffle_32(Vector a, Vector b) {
    return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), which));
  }
};

}  // namespace
}  // namespace tierload

#define TIERLOAD_PLANE_KERNEL planes_avx512bw
#define TIERLOAD_PLANE_KERNEL_NAME "avx512bw"
#include "codec/planes_kernel.inc"
#endif
