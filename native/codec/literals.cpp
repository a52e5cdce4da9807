// RFC 8878 is what this follows: 3.1.1 (frames and blocks), 4.2 (Huffman codes), 4.1 (the FSE code of their weights).
#include "codec/literals.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "codec/frames.h"
#include "codec/weights.h"

namespace tierload {
namespace {

// The longest code has 11 bits. A table of 12, which fills a first-level cache of 32 KiB, gives two long codes at once.
constexpr unsigned short_table = 11;
constexpr unsigned long_table = 12;
constexpr unsigned word_bits = 56;     // that can be taken of a refilled word
constexpr unsigned run_symbols = 6;    // at most, of one look-up: what an entry of the table has room for
constexpr unsigned streams_count = 4;  // always
constexpr size_t round_bytes = word_bits / short_table * run_symbols;
constexpr size_t round_input = 7;  // so far down the place of the next word moves at the most

template <typename Word>
Word load(const std::byte* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// One of the four streams. Codes are read from its end to its start. The next bits are the top ones of `bits`; its
// lowest bit that is set tells how many have been taken of the 8 bytes at `word`.
struct Stream {
  const std::byte* start;
  const std::byte* word;
  uint64_t bits;
  std::byte* out;
  std::byte* out_end;

  void refill() {
    const int taken = std::countr_zero(bits);
    word -= taken >> 3;
    bits = (load<uint64_t>(word) | 1) << (taken & 7);
  }
  // Negative: codes were taken from before the stream.
  int64_t bits_left() const { return (word + 8 - start) * 8 - std::countr_zero(bits); }
  // How often all lookups can be done without a look at the bounds.
  size_t rounds() const {
    if (word < start) return 0;
    const auto room = static_cast<size_t>(out_end - out);
    return std::min(room < sizeof(uint64_t) ? 0 : (room - sizeof(uint64_t)) / round_bytes,
                    static_cast<size_t>(word - start) / round_input);
  }
};

// Whole rounds of `count` streams in turn, so that their lookups do not wait for each other.
template <size_t count, unsigned table_bits>
[[gnu::always_inline]] inline void run(Stream* streams, const uint64_t* runs) {
  constexpr unsigned lookups = word_bits / table_bits;
  const std::byte* word[count];
  uint64_t bits[count];
  std::byte* out[count];
  for (;;) {
    size_t rounds = streams[0].rounds();
    for (size_t s = 1; s < count; ++s) rounds = std::min(rounds, streams[s].rounds());
    if (rounds == 0) return;
    for (size_t s = 0; s < count; ++s) {
      word[s] = streams[s].word;
      bits[s] = streams[s].bits;
      out[s] = streams[s].out;
    }
    for (; rounds != 0; --rounds) {
      for (size_t s = 0; s < count; ++s) {
        const int taken = std::countr_zero(bits[s]);
        word[s] -= taken >> 3;
        bits[s] = (load<uint64_t>(word[s]) | 1) << (taken & 7);
      }
#pragma GCC unroll 5
      for (unsigned lookup = 0; lookup < lookups; ++lookup) {
        for (size_t s = 0; s < count; ++s) {
          const uint64_t found = runs[bits[s] >> (64 - table_bits)];
          bits[s] <<= found & 63;
          const uint64_t symbols = found >> 16;
          std::memcpy(out[s], &symbols, sizeof symbols);
          out[s] += (found >> 8) & 0xFF;
        }
      }
    }
    for (size_t s = 0; s < count; ++s) {
      streams[s].word = word[s];
      streams[s].bits = bits[s];
      streams[s].out = out[s];
    }
  }
}

template <unsigned table_bits>
[[gnu::always_inline]] inline void run_all(Stream* streams, const uint64_t* runs) {
  run<streams_count, table_bits>(streams, runs);
  for (size_t s = 0; s < streams_count; ++s) run<1, table_bits>(streams + s, runs);
}

template <unsigned table_bits>
void run_plain(Stream* streams, const uint64_t* runs) {
  run_all<table_bits>(streams, runs);
}

using Run = void (*)(Stream*, const uint64_t*);

#if defined(__x86_64__)
// The same with shifts by any register.
template <unsigned table_bits>
[[gnu::target("bmi,bmi2")]] void run_bmi2(Stream* streams, const uint64_t* runs) {
  run_all<table_bits>(streams, runs);
}
#endif

template <unsigned table_bits>
Run choose([[maybe_unused]] bool plain) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!plain && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) return run_bmi2<table_bits>;
#endif
  return run_plain<table_bits>;
}

// The literals section of a frame that is nothing else. Its parts are bounded, not checked.
struct Literals {
  Bytes weights;  // compressed, with their header
  std::array<Bytes, streams_count> streams;
};

std::optional<Bytes> only_block(Bytes frame, size_t content) {
  constexpr uint32_t magic = 0xFD2FB528;
  constexpr size_t block_header = 3;
  if (frame.size() < 16 || load<uint32_t>(frame.data()) != magic) return {};
  // A single segment, neither dictionary nor checksum; the content size has 1, 2 or 4 bytes.
  const auto descriptor = std::to_integer<unsigned>(frame[4]);
  if (descriptor != 0x20 && descriptor != 0x60 && descriptor != 0xA0) return {};
  const size_t size_bytes = size_t{1} << (descriptor >> 6);
  const std::byte* const at = frame.data() + 5;
  const size_t size = size_bytes == 1   ? load<uint8_t>(at)
                      : size_bytes == 2 ? load<uint16_t>(at) + size_t{256}
                                        : load<uint32_t>(at);
  if (size != content || size > frame_bytes) return {};
  const Bytes rest = frame.subspan(5 + size_bytes);
  if (rest.size() < block_header) return {};
  const uint32_t header = load<uint16_t>(rest.data()) | std::to_integer<uint32_t>(rest[2]) << 16;
  constexpr uint32_t last_and_compressed = 1 | 2 << 1;
  const Bytes block = rest.subspan(block_header);
  if ((header & 7) != last_and_compressed || header >> 3 != block.size() || block.size() > frame_bytes) return {};
  return block;
}

std::optional<Literals> only_literals(Bytes block, size_t content) {
  if (block.size() < 16 || block.back() != std::byte{0}) return {};  // the last byte: no sequences
  const auto first = std::to_integer<unsigned>(block[0]);
  const unsigned format = (first >> 2) & 3;
  if ((first & 3) != 2 || format == 0) return {};  // a tree of its own, four streams
  const size_t header = 2 + format;
  const unsigned size_bits = format == 1 ? 10 : format == 2 ? 14 : 18;
  const uint64_t sizes = load<uint64_t>(block.data()) >> 4;
  const uint64_t mask = (uint64_t{1} << size_bits) - 1;
  const size_t stored = (sizes >> size_bits) & mask;
  if ((sizes & mask) != content || header + stored + 1 != block.size()) return {};

  const Bytes section = block.subspan(header, stored);
  constexpr size_t jump_table = 6;
  if (section.empty()) return {};
  const size_t weights = 1 + std::to_integer<size_t>(section[0]);
  if (weights + jump_table > section.size()) return {};
  Literals out{section.first(weights), {}};
  const std::byte* const jumps = section.data() + weights;
  Bytes rest = section.subspan(weights + jump_table);
  for (size_t s = 0; s < streams_count; ++s) {
    const size_t length = s + 1 == streams_count ? rest.size() : load<uint16_t>(jumps + 2 * s);
    if (length > rest.size()) return {};
    out.streams[s] = rest.first(length);
    rest = rest.subspan(length);
    if (length == 0 || out.streams[s].back() == std::byte{0}) return {};  // there the first bit that is set is a mark
  }
  return out;
}

uint64_t put_before(uint64_t run, uint64_t code) {
  constexpr uint64_t sizes = 0xFFFF;
  return ((run & ~sizes) << 8) + (run & sizes) + code;
}

}  // namespace

void LiteralDecoder::fill_tables(std::span<const uint8_t> weights, unsigned code_bits, unsigned table_bits) {
  std::fill_n(runs_.begin(), size_t{2} << table_bits, 0);
  // The smallest weight, which is the longest code, comes first; equal ones in the order of their symbols.
  size_t place = 0;                                     // of the code, among all values of table_bits
  std::array<std::pair<uint8_t, uint16_t>, 256> codes;  // symbol and place
  size_t count = 0;
  for (unsigned weight = 1; weight <= code_bits; ++weight) {
    const unsigned bits = code_bits + 1 - weight;
    for (size_t symbol = 0; symbol < weights.size(); ++symbol) {
      if (weights[symbol] != weight) continue;
      codes[count++] = {static_cast<uint8_t>(symbol), static_cast<uint16_t>(place)};
      code_bits_[symbol] = static_cast<uint8_t>(bits);
      place += size_t{1} << (table_bits - bits);
    }
  }
  // A run is a code, and the run of what is behind it. With a code of one bit, no more than 5 bits of that are looked
  // at, so that a run has room for its symbols.
  const unsigned behind_max = code_bits_[codes[count - 1].first] == 1 ? run_symbols - 1 : table_bits;
  for (unsigned k = 1; k <= table_bits; ++k) {
    for (size_t i = 0; i < count; ++i) {
      const auto [symbol, at] = codes[i];
      const unsigned bits = code_bits_[symbol];
      if (bits > k) continue;
      const unsigned behind_bits = std::min(k - bits, behind_max);
      const uint64_t* const behind = &runs_[size_t{1} << behind_bits];
      uint64_t* const to = &runs_[(size_t{1} << k) + (at >> (table_bits - k))];
      const uint64_t code = bits | 1U << 8 | uint64_t{symbol} << 16;
      const unsigned unseen = k - bits - behind_bits;
      if (unseen == 0) {  // nearly always; only without the shift can it be vectorised
        for (size_t j = 0; j < size_t{1} << behind_bits; ++j) to[j] = put_before(behind[j], code);
      } else {
        for (size_t j = 0; j < size_t{1} << (k - bits); ++j) to[j] = put_before(behind[j >> unseen], code);
      }
    }
  }
}

bool LiteralDecoder::decode(Bytes frame, MutableBytes out) {
  const auto block = only_block(frame, out.size());
  if (!block) return false;
  const auto literals = only_literals(*block, out.size());
  if (!literals) return false;
  const auto weights = read_weights(literals->weights);
  if (!weights) return false;

  const size_t quarter = (out.size() + 3) / 4;
  if (3 * quarter > out.size()) return false;
  const bool long_codes = frame.size() > out.size() / 32 * 23;  // 5.75 bits on average
  const unsigned table_bits = long_codes ? long_table : short_table;
  fill_tables(std::span(weights->values).first(weights->count), weights->code_bits, table_bits);
  std::array<Stream, streams_count> streams;
  for (size_t s = 0; s < streams_count; ++s) {
    const Bytes stored = literals->streams[s];
    const std::byte* const word = stored.data() + stored.size() - 8;  // perhaps in what comes before: enough does
    const int unused = 1 + std::countl_zero(std::to_integer<uint8_t>(stored.back()));
    std::byte* const to = out.data() + s * quarter;
    std::byte* const end = s + 1 == streams_count ? out.data() + out.size() : to + quarter;
    streams[s] = {stored.data(), word, (load<uint64_t>(word) | 1) << unused, to, end};
  }
  const uint64_t* const runs = &runs_[size_t{1} << table_bits];
  (long_codes ? choose<long_table>(plain_) : choose<short_table>(plain_))(streams.data(), runs);
  for (Stream& stream : streams) {
    while (stream.out != stream.out_end) {
      stream.refill();
      const auto symbol = static_cast<uint8_t>(runs[stream.bits >> (64 - table_bits)] >> 16);
      stream.bits <<= code_bits_[symbol];
      *stream.out++ = std::byte{symbol};
      if (stream.bits_left() < 0) return false;
    }
    if (stream.bits_left() != 0) return false;
  }
  return true;
}

}  // namespace tierload
