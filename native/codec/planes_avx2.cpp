// Byte planes for AVX2. Compile this file with -mavx2 on x86-64; elsewhere it is empty.
#if defined(__x86_64__)
#if !defined(__AVX2__)
#error "codec/planes_avx2.cpp must be compiled with -mavx2"
#endif
#include <immintrin.h>
#include <stddef.h>

namespace tierload {
namespace {

struct Simd {
  using Vector = __m256i;

  static Vector load(const void* at) { return _mm256_loadu_si256(static_cast<const Vector*>(at)); }
  static void store(void* at, Vector v) { _mm256_storeu_si256(static_cast<Vector*>(at), v); }
  static Vector either(Vector a, Vector b) { return _mm256_or_si256(a, b); }
  template <int bits>
  static Vector left_16(Vector v) {
    return _mm256_slli_epi16(v, bits);
  }
  template <int bits>
  static Vector right_16(Vector v) {
    return _mm256_srli_epi16(v, bits);
  }

  static Vector low_8(Vector v) { return _mm256_and_si256(v, _mm256_set1_epi16(0xFF)); }
  static Vector low_16(Vector v) { return _mm256_and_si256(v, _mm256_set1_epi32(0xFFFF)); }
  static Vector high_16(Vector v) { return _mm256_srli_epi32(v, 16); }
  static Vector narrow_16(Vector a, Vector b) { return _mm256_packus_epi16(a, b); }
  static Vector narrow_32(Vector a, Vector b) { return _mm256_packus_epi32(a, b); }
  static Vector even_32(Vector a, Vector b) { return shuffle_32<0x88>(a, b); }
  static Vector odd_32(Vector a, Vector b) { return shuffle_32<0xDD>(a, b); }

  static Vector zip_low_8(Vector a, Vector b) { return _mm256_unpacklo_epi8(a, b); }
  static Vector zip_high_8(Vector a, Vector b) { return _mm256_unpackhi_epi8(a, b); }
  static Vector zip_low_16(Vector a, Vector b) { return _mm256_unpacklo_epi16(a, b); }
  static Vector zip_high_16(Vector a, Vector b) { return _mm256_unpackhi_epi16(a, b); }
  static Vector zip_low_32(Vector a, Vector b) { return _mm256_unpacklo_epi32(a, b); }
  static Vector zip_high_32(Vector a, Vector b) { return _mm256_unpackhi_epi32(a, b); }

  // Unit S·l + k, the k-th of lane l, goes to 2·k + l; reorder() is the way back.
  template <size_t S>
  static Vector order(Vector v) {
    if constexpr (S == 2) return _mm256_permute4x64_epi64(v, 0xD8);
    if constexpr (S == 4) return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m128i zipped = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(v, 0xD8), _mm256_broadcastsi128_si256(zipped));
  }
  template <size_t S>
  static Vector reorder(Vector v) {
    if constexpr (S == 2) return _mm256_permute4x64_epi64(v, 0xD8);
    if constexpr (S == 4) return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    const __m128i unzipped = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(unzipped)), 0xD8);
  }

 private:
  template <int which>
  static Vector shuffle_32(Vector a, Vector b) {
    return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), which));
  }
};

}  // namespace
}  // namespace tierload

#define TIERLOAD_PLANE_KERNEL planes_avx2
#define TIERLOAD_PLANE_KERNEL_NAME "avx2"
#include "codec/planes_kernel.inc"
#endif
