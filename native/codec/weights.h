// The description of a Huffman code in zstd's literals: one weight a symbol, compressed with FSE (RFC 8878, 4.2.1).
#pragma once

#include <array>
#include <optional>

#include "tierload/storage.h"

namespace tierload {

struct Weights {
  std::array<uint8_t, 256> values{};  // 0: the symbol does not occur; else its code has code_bits + 1 - weight bits
  size_t count = 0;
  unsigned code_bits = 0;  // of the longest code, at most 11
};

// `stored` begins with the length of the rest. Nothing for weights that are stored in another way, or are wrong.
std::optional<Weights> read_weights(Bytes stored);

}  // namespace tierload
