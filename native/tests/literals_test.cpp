// The fast way for literals, against zstd.
#include "codec/literals.h"

#include <doctest/doctest.h>
#include <zstd.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "codec/frames.h"

namespace tierload {
namespace {

using Vector = std::vector<std::byte>;

// Bytes as different from each other as `spread` says, around the exponent of small weights.
Vector exponents(size_t size, double spread, std::mt19937& random) {
  std::normal_distribution<double> normal(120, spread);
  Vector out(size);
  for (std::byte& byte : out) byte = static_cast<std::byte>(std::clamp(std::lround(normal(random)), 0L, 255L));
  return out;
}

Vector compressed(const Vector& content) {
  FrameCoder coder;
  Vector frame(ZSTD_compressBound(content.size()));
  std::vector<uint32_t> lengths;
  frame.resize(coder.encode(Method::huffman, content, frame, lengths).value());
  return frame;
}

}  // namespace

TEST_CASE("exponents take the fast way and come back") {
  std::mt19937 random(1);
  for (const double spread : {0.3, 0.8, 1.5, 3.0, 8.0, 16.0, 25.0}) {
    for (const size_t size :
         {size_t{2000}, size_t{32768}, size_t{65535}, size_t{65792}, size_t{100'001}, frame_bytes}) {
      const Vector content = exponents(size, spread, random);
      for (const bool plain : {false, true}) {
        LiteralDecoder literals(plain);
        Vector back(size);
        CHECK(literals.decode(compressed(content), back));
        CHECK(back == content);
      }
    }
  }
}

TEST_CASE("streams of very different density come back") {
  std::mt19937 random(2);
  for (size_t dense = 0; dense < 4; ++dense) {
    Vector content = exponents(frame_bytes, 0.8, random);
    const Vector wide = exponents(frame_bytes / 4, 20.0, random);
    std::ranges::copy(wide, content.begin() + static_cast<std::ptrdiff_t>(dense * wide.size()));
    LiteralDecoder literals;
    Vector back(content.size());
    CHECK(literals.decode(compressed(content), back));
    CHECK(back == content);
  }
}

TEST_CASE("what the fast way takes of damaged frames, zstd takes as well, with the same result") {
  std::mt19937 random(3);
  LiteralDecoder literals;
  size_t taken = 0;
  size_t refused = 0;
  for (const double spread : {0.8, 2.0, 6.0}) {
    const Vector content = exponents(3000, spread, random);
    const Vector frame = compressed(content);
    Vector mutant = frame;
    Vector back(content.size());
    Vector expected(content.size());
    for (size_t at = 0; at < frame.size(); ++at) {
      for (const unsigned change : {1U, 0x10U, 0x80U, 0xFFU}) {
        mutant[at] = frame[at] ^ static_cast<std::byte>(change);
        if (literals.decode(mutant, back)) {
          ++taken;
          const size_t size = ZSTD_decompress(expected.data(), expected.size(), mutant.data(), mutant.size());
          if (size != content.size() || expected != back) FAIL("byte ", at, " changed by ", change);
        } else {
          ++refused;
        }
      }
      mutant[at] = frame[at];
    }
    for (size_t size = 0; size < frame.size(); ++size) {
      const Vector cut(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(size));
      if (literals.decode(cut, back)) FAIL("cut to ", size, " of ", frame.size(), " bytes");
    }
  }
  CHECK(refused > 0);
  CHECK(taken > 0);
}

TEST_CASE("other frames are left to zstd") {
  std::mt19937 random(4);
  LiteralDecoder literals;
  const auto is_left = [&](const Vector& content) {
    Vector back(content.size());
    return !literals.decode(compressed(content), back);
  };
  Vector noise(4000);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
  CHECK(is_left(Vector(4000)));                 // one run of a byte
  CHECK(is_left(noise));                        // stored as they are
  CHECK(is_left(exponents(100, 1.0, random)));  // a single stream
  Vector back(10);
  CHECK(!literals.decode({}, back));
}

}  // namespace tierload
