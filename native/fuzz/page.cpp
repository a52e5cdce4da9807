// libFuzzer target: decode_page() on hostile bytes, and the round trip of the same bytes as a page.
// Byte 0: item size (bits 0-1), floating (bit 2), Compression::small (bit 3), codec (bits 4-5: mostly planes).
// Bytes 1-3: raw length, little-endian, modulo 256 KiB + 1. The rest is the page.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tierload/codec.h"
#include "tierload/error.h"

namespace {

using namespace tierload;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "page fuzzer: %s\n", what);
  std::abort();
}

void decode(Bytes stored, Codec codec, uint8_t item_size, size_t raw_size) {
  static CodecScratch scratch;
  // Exactly as large as the page, so that the sanitizer sees every byte beyond.
  const auto raw = std::make_unique<std::byte[]>(raw_size);
  try {
    decode_page(stored, codec, item_size, {raw.get(), raw_size}, scratch);
  } catch (const CorruptError& error) {
    require(std::strlen(error.what()) != 0, "an error without a message");
  }
}

void round_trip(Bytes raw, uint8_t item_size, bool floating, Compression how) {
  static CodecScratch scratch;
  const Encoded encoded = encode_page(raw, item_size, floating, how, scratch);
  require(encoded.bytes.size() <= raw.size(), "an encoded page larger than the raw one");
  const std::vector<std::byte> stored(encoded.bytes.begin(), encoded.bytes.end());
  std::vector<std::byte> back(raw.size());
  decode_page(stored, encoded.codec, item_size, back, scratch);
  require(back.empty() || std::memcmp(back.data(), raw.data(), raw.size()) == 0, "a page came back changed");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t head = 4;
  constexpr size_t raw_size_max = 256 * 1024;
  if (size < head) return 0;
  const auto item_size = static_cast<uint8_t>(1U << (data[0] & 3U));
  const bool floating = (data[0] & 4U) != 0;
  const Compression how = (data[0] & 8U) != 0 ? Compression::small : Compression::fast;
  const unsigned choice = (data[0] >> 4U) & 3U;
  const Codec codec = choice == 0 ? Codec::raw : Codec::planes;
  const size_t raw_size = (data[1] | size_t{data[2]} << 8U | size_t{data[3]} << 16U) % (raw_size_max + 1);
  const Bytes page(reinterpret_cast<const std::byte*>(data) + head, size - head);
  decode(page, codec, item_size, raw_size);
  round_trip(page, item_size, floating, how);
  return 0;
}
