// A fast way for the one kind of zstd frame that exponent planes become: a single block, all of it literals, Huffman
// codes in four streams. zstd itself decodes one or two of them at a time, this up to six.
#pragma once

#include <array>

#include "tierload/storage.h"

namespace tierload {

class LiteralDecoder {
 public:
  // `plain`: with no instruction that a processor may lack; for tests.
  explicit LiteralDecoder(bool plain = false) : plain_(plain) {}

  // Decodes `frame` into exactly `out`. Returns false, with anything in `out`, when the frame is of another kind or has
  // a fault: then it is zstd's to decode or to refuse. The input may be hostile.
  bool decode(Bytes frame, MutableBytes out);

 private:
  void fill_tables(std::span<const uint8_t> weights, unsigned code_bits, unsigned table_bits);

  const bool plain_;
  // What the next k bits of a stream hold, for each k up to that of the table: the codes that fit, as a run of symbols.
  // The table of k begins at 2^k. In byte 0 of a run its length in bits, in byte 1 in symbols, from byte 2 on the
  // symbols.
  std::array<uint64_t, 2 << 12> runs_;
  std::array<uint8_t, 256> code_bits_;  // by symbol
};

}  // namespace tierload
