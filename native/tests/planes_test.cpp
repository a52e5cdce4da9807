// Byte planes: every instruction set against the plain loops, and pages of every kind of item at every awkward size.
#include "codec/planes.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "codec/plane_kernels.h"
#include "tierload/codec.h"

namespace tierload {
namespace {

using Byte = unsigned char;

constexpr uint8_t item_sizes[] = {1, 2, 4, 8};
constexpr Byte guard = 0xA5;
constexpr size_t guard_bytes = 80;  // more than the widest vector

std::span<const PlaneKernel* const> kernels() {
  size_t count = 0;
  const PlaneKernel* const* const here = plane_kernels_here(&count);
  return {here, count};
}

std::vector<Byte> random_bytes(size_t size, std::mt19937& random) {
  std::vector<Byte> out(size);
  for (Byte& byte : out) byte = static_cast<Byte>(random());
  return out;
}

// What docs/FORMAT.md says, as plainly as it can be written.
Byte plane_byte(const Byte* item, size_t item_size, bool rotate, size_t plane) {
  if (!rotate || plane + 2 < item_size) return item[plane];
  unsigned top = item[item_size - 2] | static_cast<unsigned>(item[item_size - 1]) << 8;
  top = (top << 1 | top >> 15) & 0xFFFF;
  return static_cast<Byte>(plane + 1 == item_size ? top >> 8 : top);
}

// Memory between guards, from an address that no vector likes.
struct Guarded {
  Guarded(size_t size, size_t shift) : bytes(size + shift + 2 * guard_bytes, guard), from(guard_bytes + shift) {}
  Byte* data() { return bytes.data() + from; }
  bool is_whole(size_t size) const {
    const auto untouched = [](Byte byte) { return byte == guard; };
    return std::all_of(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(from), untouched) &&
           std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(from + size), bytes.end(), untouched);
  }
  std::vector<Byte> bytes;
  size_t from;
};

void check_kernel(const PlaneKernel& kernel, size_t items, size_t item_size, bool rotate, std::mt19937& random) {
  const size_t shift = random() % 64;
  const std::vector<Byte> memory = random_bytes(items * item_size + shift, random);
  const Byte* const raw = memory.data() + shift;
  std::vector<Guarded> planes;
  std::array<Byte*, 8> out{};
  for (size_t p = 0; p < item_size; ++p) planes.emplace_back(items, random() % 64);
  for (size_t p = 0; p < item_size; ++p) out[p] = planes[p].data();
  split_items(kernel, raw, items, item_size, rotate, out.data());
  bool right = true;
  for (size_t p = 0; p < item_size; ++p) {
    right = right && planes[p].is_whole(items);
    for (size_t i = 0; i < items; ++i) {
      right = right && out[p][i] == plane_byte(raw + i * item_size, item_size, rotate, p);
    }
  }
  Guarded back(items * item_size, random() % 64);
  merge_items(kernel, out.data(), items, item_size, rotate, back.data());
  right = right && back.is_whole(items * item_size) && std::equal(raw, raw + items * item_size, back.data());
  if (!right) FAIL(kernel.name, ": ", items, " items of ", item_size, " bytes, rotate ", rotate);
}

// Every short number of items, and the neighbours of each power of two, vector and frame boundary up to 70,000.
std::set<size_t> awkward_counts() {
  std::set<size_t> counts = {70'000};
  for (size_t count = 0; count <= 300; ++count) counts.insert(count);
  for (const size_t boundary : {512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 2048 * 3, 4096 * 5, 69'632}) {
    for (size_t near = boundary - 2; near <= boundary + 2; ++near) counts.insert(near);
  }
  return counts;
}

// Numbers as a state has them: small exponents' spread, noise below; every 997th is a special value.
std::vector<Byte> numbers(size_t items, size_t item_size, std::mt19937& random) {
  std::vector<Byte> out = random_bytes(items * item_size, random);
  std::geometric_distribution<int> exponent(0.3);
  for (size_t i = 0; i < items; ++i) {
    Byte* const item = out.data() + i * item_size;
    item[item_size - 1] = static_cast<Byte>((item[item_size - 1] & 0x80) | (0x3F - exponent(random) % 32));
    if (i % 997 == 5) std::fill(item, item + item_size, static_cast<Byte>(i % 2 == 0 ? 0xFF : 0x00));
  }
  return out;
}

bool comes_back(Bytes raw, uint8_t item_size, bool floating, Compression how) {
  static CodecScratch writer;
  static CodecScratch reader;
  const Encoded encoded = encode_page(raw, item_size, floating, how, writer);
  std::vector<std::byte> back(raw.size());
  decode_page(encoded.bytes, encoded.codec, item_size, back, reader);
  return encoded.bytes.size() <= raw.size() && std::equal(raw.begin(), raw.end(), back.begin());
}

}  // namespace

TEST_CASE("every instruction set splits and merges like the definition, at any size and address") {
  std::mt19937 random(3);
  for (const PlaneKernel* kernel : kernels()) {
    for (const size_t item_size : {2, 4, 8}) {
      for (const bool rotate : {false, true}) {
        for (const size_t items : awkward_counts()) check_kernel(*kernel, items, item_size, rotate, random);
        for (int i = 0; i < 20; ++i) check_kernel(*kernel, random() % 70'001, item_size, rotate, random);
      }
    }
  }
}

TEST_CASE("pages of every kind of item come back at every awkward size") {
  std::mt19937 random(7);
  for (const uint8_t item_size : item_sizes) {
    const std::vector<Byte> all = numbers(70'000, item_size, random);
    const std::vector<Byte> noise = random_bytes(70'000 * item_size, random);
    for (const bool floating : {false, true}) {
      for (const size_t items : awkward_counts()) {
        for (const std::vector<Byte>* from : {&all, &noise}) {
          const Bytes raw = std::as_bytes(std::span(*from).first(items * item_size));
          if (!comes_back(raw, item_size, floating, Compression::fast)) {
            FAIL(items, " items of ", int{item_size}, " bytes, floating ", floating, ", noise ", from == &noise);
          }
        }
      }
    }
  }
}

TEST_CASE("pages around the boundaries of their planes' frames and at the largest size in a store come back") {
  std::mt19937 random(9);
  constexpr size_t frame = 128 * 1024;
  const std::vector<Byte> all = numbers(2 * frame + 8, 8, random);
  for (const uint8_t item_size : item_sizes) {
    for (const size_t boundary : {frame / item_size, frame, 2 * frame, size_t{1048576} / item_size}) {
      for (size_t items = boundary - 1; items <= boundary + 1 && items * item_size <= all.size(); ++items) {
        const Bytes raw = std::as_bytes(std::span(all).first(items * item_size));
        CHECK(comes_back(raw, item_size, true, Compression::fast));
        CHECK(comes_back(raw, item_size, false, Compression::small));
      }
    }
  }
}

TEST_CASE("random bytes never grow, whatever they are said to be") {
  std::mt19937 random(13);
  CodecScratch scratch;
  for (const size_t size : {size_t{4096}, size_t{65536}, size_t{1048576}}) {
    const std::vector<Byte> noise = random_bytes(size, random);
    const Bytes raw = std::as_bytes(std::span(noise));
    for (const uint8_t item_size : item_sizes) {
      for (const Compression how : {Compression::fast, Compression::small}) {
        const Encoded encoded = encode_page(raw, item_size, true, how, scratch);
        CHECK(encoded.codec == Codec::raw);
        CHECK(encoded.bytes.data() == raw.data());  // not even copied
      }
    }
  }
}

TEST_CASE("numbers of one sign are not rotated: the plane below the exponent's is noise then") {
  std::mt19937 random(19);
  CodecScratch scratch;
  for (const uint8_t item_size : std::span(item_sizes).subspan(1)) {
    std::vector<Byte> signs = numbers(1 << 16, item_size, random);
    std::vector<Byte> positive = signs;
    for (size_t top = item_size - 1u; top < positive.size(); top += item_size) positive[top] &= 0x7F;
    const auto transform = [&](const std::vector<Byte>& numbers, Compression how) {
      return std::to_integer<int>(
          encode_page(std::as_bytes(std::span(numbers)), item_size, true, how, scratch).bytes[1]);
    };
    CHECK(transform(signs, Compression::fast) == 1);
    CHECK(transform(positive, Compression::fast) == 0);
    CHECK(transform(positive, Compression::small) == 1);
    CHECK(comes_back(std::as_bytes(std::span(positive)), item_size, true, Compression::fast));
  }
}

TEST_CASE("a page that is random in most places is still looked at") {
  std::mt19937 random(17);
  CodecScratch scratch;
  for (const uint8_t item_size : item_sizes) {
    std::vector<Byte> bytes = random_bytes(1 << 20, random);
    std::fill(bytes.begin() + 300'000, bytes.begin() + 500'000, Byte{0});
    const Encoded encoded = encode_page(std::as_bytes(std::span(bytes)), item_size, false, Compression::fast, scratch);
    CHECK(encoded.bytes.size() < bytes.size() * 85 / 100);
  }
}

}  // namespace tierload
