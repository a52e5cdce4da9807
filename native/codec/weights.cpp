#include "codec/weights.h"

#include <bit>
#include <span>

namespace tierload {
namespace {

constexpr unsigned accuracy_max = 6;
constexpr unsigned code_bits_max = 11;
constexpr size_t weight_kinds = code_bits_max + 1;

unsigned highest_bit(size_t value) { return static_cast<unsigned>(std::bit_width(value)) - 1; }

// Bits of a byte sequence, the lowest of the first byte first. Behind its end they are 0.
class ForwardBits {
 public:
  explicit ForwardBits(Bytes bytes) : bytes_(bytes) {}
  unsigned peek(unsigned count) const {
    unsigned value = 0;
    for (unsigned i = 0; i < count; ++i) value |= bit(at_ + i) << i;
    return value;
  }
  void skip(unsigned count) { at_ += count; }
  unsigned read(unsigned count) {
    const unsigned value = peek(count);
    skip(count);
    return value;
  }
  size_t bytes_read() const { return (at_ + 7) / 8; }

 private:
  unsigned bit(size_t at) const {
    return at / 8 < bytes_.size() ? (std::to_integer<unsigned>(bytes_[at / 8]) >> (at % 8)) & 1 : 0;
  }
  Bytes bytes_;
  size_t at_ = 0;
};

// The same backwards from the highest bit that is set, which is only a mark. Before its start bits are 0.
class BackwardBits {
 public:
  // The last byte is not 0.
  explicit BackwardBits(Bytes bytes)
      : bytes_(bytes),
        left_(static_cast<int>(8 * (bytes.size() - 1) + highest_bit(std::to_integer<size_t>(bytes.back())))) {}
  unsigned read(unsigned count) {
    unsigned value = 0;
    for (unsigned i = 0; i < count; ++i) {
      --left_;
      value = value << 1 |
              (left_ < 0 ? 0 : (std::to_integer<unsigned>(bytes_[static_cast<size_t>(left_) / 8]) >> (left_ % 8)) & 1);
    }
    return value;
  }
  bool overrun() const { return left_ < 0; }

 private:
  Bytes bytes_;
  int left_;
};

struct FseState {
  uint8_t symbol = 0;
  uint8_t bits = 0;  // to read for the next state
  uint8_t base = 0;  // to add to them
};

struct FseTable {
  std::array<FseState, 1 << accuracy_max> states;
  unsigned accuracy = 0;
};

// How often each symbol occurs in the table; -1: once, at its end.
using Shares = std::array<int, weight_kinds>;

std::optional<Shares> read_shares(ForwardBits& bits, unsigned accuracy) {
  Shares shares{};
  int left = 1 << accuracy;
  size_t symbol = 0;
  while (left > 0) {
    if (symbol == shares.size()) return {};
    // The values up to left + 1 take one bit less where they are small.
    const auto most = static_cast<unsigned>(left) + 1;
    const unsigned length = highest_bit(most) + 1;
    const unsigned half = (1U << (length - 1)) - 1;
    const unsigned short_ones = (1U << length) - 1 - most;
    unsigned value = bits.peek(length);
    if ((value & half) < short_ones) {
      value &= half;
      bits.skip(length - 1);
    } else {
      if (value > half) value -= short_ones;
      bits.skip(length);
    }
    const int share = static_cast<int>(value) - 1;
    left -= share < 0 ? 1 : share;
    shares[symbol++] = share;
    if (share != 0) continue;
    for (unsigned zeros = 3; zeros == 3;) {
      zeros = bits.read(2);
      symbol += zeros;
      if (symbol > shares.size()) return {};
    }
  }
  if (left < 0) return {};
  return shares;
}

FseTable make_table(const Shares& shares, unsigned accuracy) {
  FseTable table;
  table.accuracy = accuracy;
  const size_t size = size_t{1} << accuracy;
  std::array<size_t, weight_kinds> next{};
  size_t high = size;
  for (size_t symbol = 0; symbol < shares.size(); ++symbol) {
    next[symbol] = static_cast<size_t>(shares[symbol] < 0 ? 1 : shares[symbol]);
    if (shares[symbol] < 0) table.states[--high].symbol = static_cast<uint8_t>(symbol);
  }
  const size_t step = (size >> 1) + (size >> 3) + 3;
  size_t at = 0;
  for (size_t symbol = 0; symbol < shares.size(); ++symbol) {
    for (int i = 0; i < shares[symbol]; ++i) {
      table.states[at].symbol = static_cast<uint8_t>(symbol);
      do at = (at + step) % size;
      while (at >= high);
    }
  }
  for (FseState& state : std::span(table.states).first(size)) {
    const size_t number = next[state.symbol]++;
    state.bits = static_cast<uint8_t>(accuracy - highest_bit(number));
    state.base = static_cast<uint8_t>((number << state.bits) - size);
  }
  return table;
}

// Two states in turn, until the bits run out.
bool decode_weights(const FseTable& table, Bytes stream, Weights& weights) {
  if (stream.empty() || stream.back() == std::byte{0}) return false;
  BackwardBits bits(stream);
  std::array<size_t, 2> states;
  for (size_t& state : states) state = bits.read(table.accuracy);
  if (bits.overrun()) return false;
  for (size_t turn = 0;; turn ^= 1) {
    if (weights.count + 2 > 255) return false;
    const FseState& state = table.states[states[turn]];
    weights.values[weights.count++] = state.symbol;
    states[turn] = state.base + bits.read(state.bits);
    if (!bits.overrun()) continue;
    weights.values[weights.count++] = table.states[states[turn ^ 1]].symbol;
    return true;
  }
}

// The last symbol's weight is not stored: it makes the code complete.
bool complete(Weights& weights) {
  size_t sum = 0;
  size_t longest_codes = 0;
  for (const uint8_t weight : std::span(weights.values).first(weights.count)) {
    sum += (size_t{1} << weight) >> 1;
    longest_codes += weight == 1 ? 1 : 0;
  }
  if (sum == 0) return false;
  weights.code_bits = highest_bit(sum) + 1;
  const size_t rest = (size_t{1} << weights.code_bits) - sum;
  if (weights.code_bits > code_bits_max || !std::has_single_bit(rest)) return false;
  const auto last = static_cast<uint8_t>(highest_bit(rest) + 1);
  longest_codes += last == 1 ? 1 : 0;
  weights.values[weights.count++] = last;
  return longest_codes >= 2;
}

}  // namespace

std::optional<Weights> read_weights(Bytes stored) {
  const auto length = std::to_integer<size_t>(stored[0]);
  if (length >= 128 || length + 1 != stored.size()) return {};  // from 128 on: not compressed
  const Bytes rest = stored.subspan(1);
  ForwardBits header(rest);
  const unsigned accuracy = header.read(4) + 5;
  if (accuracy > accuracy_max) return {};
  const auto shares = read_shares(header, accuracy);
  if (!shares || header.bytes_read() >= rest.size()) return {};
  Weights weights;
  const FseTable table = make_table(*shares, accuracy);
  if (!decode_weights(table, rest.subspan(header.bytes_read()), weights) || !complete(weights)) return {};
  return weights;
}

}  // namespace tierload
