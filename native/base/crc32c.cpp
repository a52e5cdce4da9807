// CRC32C (Castagnoli), reflected, as RFC 3720 uses it. Checked here are records and headers of a few KiB at most,
// where one dependent chain of crc32 instructions (about 8 bytes in 3 cycles) is far from mattering.
#include <array>
#include <cstring>

#include "tierload/digest.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tierload {
namespace {

constexpr uint32_t polynomial = 0x82F63B78;

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? polynomial : 0);
    table[i] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> table = make_table();

constexpr uint32_t update_table(uint32_t state, Bytes data) {
  for (std::byte byte : data) {
    state = (state >> 8) ^ table[(state ^ std::to_integer<uint32_t>(byte)) & 0xFF];
  }
  return state;
}

// The check value of every CRC32C, here because a processor with SSE4.2 never takes the table at run time.
constexpr std::array<std::byte, 9> check = {std::byte{'1'}, std::byte{'2'}, std::byte{'3'},
                                            std::byte{'4'}, std::byte{'5'}, std::byte{'6'},
                                            std::byte{'7'}, std::byte{'8'}, std::byte{'9'}};
static_assert(~update_table(~0U, check) == 0xE3069283);

#if defined(__x86_64__)
[[gnu::target("sse4.2")]] uint32_t update_sse42(uint32_t state, Bytes data) {
  uint64_t wide = state;
  while (data.size() >= 8) {
    uint64_t word;
    std::memcpy(&word, data.data(), 8);
    wide = _mm_crc32_u64(wide, word);
    data = data.subspan(8);
  }
  state = static_cast<uint32_t>(wide);
  for (std::byte byte : data) state = _mm_crc32_u8(state, std::to_integer<uint8_t>(byte));
  return state;
}
#endif

using Update = uint32_t (*)(uint32_t, Bytes);

Update choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("sse4.2")) return update_sse42;
#endif
  return update_table;
}

}  // namespace

uint32_t crc32c(Bytes data, uint32_t seed) {
  static const Update update = choose();
  return ~update(~seed, data);
}

}  // namespace tierload
