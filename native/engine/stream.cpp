#include "engine/stream.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tierload {

#ifdef __SSE2__

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t line = 64;
  const size_t head = (line - reinterpret_cast<uintptr_t>(to) % line) % line;
  if (bytes < 4096) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= line; bytes -= line, to += line, from += line) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to, from, bytes);
  _mm_sfence();  // before another thread is told that it is there
}

#else

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace tierload
