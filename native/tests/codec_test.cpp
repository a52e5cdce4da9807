// The page codec and the checksums, against docs/FORMAT.md sections 3 and 7.
#include "tierload/codec.h"

#include <doctest/doctest.h>
#include <zstd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "base/xxh_kernels.h"
#include "tierload/digest.h"
#include "tierload/error.h"

namespace tierload {
namespace {

using Vector = std::vector<std::byte>;

enum class Data { random, gaussian_fp32, gaussian_bf16, zeros, sparse, fp32_of_bf16, text, half_zero };
constexpr Data all_data[] = {Data::random, Data::gaussian_fp32, Data::gaussian_bf16, Data::zeros,
                             Data::sparse, Data::fp32_of_bf16,  Data::text,          Data::half_zero};
constexpr uint8_t item_sizes[] = {1, 2, 4, 8};
constexpr size_t mib = 1 << 20;

// A weight of a trained net: normal, with a scale for every row of 1024.
class Weights {
 public:
  float next() {
    if (count_++ % 1024 == 0) scale_ = 0.02F * std::exp(0.3F * normal_(random_));
    return scale_ * normal_(random_);
  }
  uint32_t bits() {
    const float weight = next();
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return bits;
  }
  uint32_t bf16() { return (bits() + 0x8000) >> 16; }

 private:
  std::mt19937 random_{5};
  std::normal_distribution<float> normal_;
  size_t count_ = 0;
  float scale_ = 1;
};

Vector make(Data data, size_t size) {
  std::mt19937 random(11);
  Weights weights;
  Vector out(size);
  const auto fill = [&](size_t item, auto next) {
    for (size_t at = 0; at < size; at += item) {
      const uint32_t value = next();
      std::memcpy(out.data() + at, &value, std::min(item, size - at));
    }
  };
  const std::string words = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. ";
  size_t at = 0;
  switch (data) {
    case Data::zeros:
      break;
    case Data::random:
      fill(4, [&] { return static_cast<uint32_t>(random()); });
      break;
    case Data::gaussian_fp32:
      fill(4, [&] { return weights.bits(); });
      break;
    case Data::gaussian_bf16:
      fill(2, [&] { return weights.bf16(); });
      break;
    case Data::fp32_of_bf16:
      fill(4, [&] { return weights.bf16() << 16; });
      break;
    case Data::sparse:
      fill(4, [&] { return random() % 50 == 0 ? weights.bits() : 0; });
      break;
    case Data::half_zero:
      fill(4, [&] { return at++ < size / 8 ? 0 : weights.bits(); });
      break;
    case Data::text:
      fill(1, [&] {
        const char letter = words[at % words.size()];
        at = letter == ' ' ? random() : at + 1;
        return static_cast<uint32_t>(letter);
      });
  }
  return out;
}

// Encodes, checks the size, decodes between guards, compares. Returns the stored size.
size_t round_trip(Bytes raw, uint8_t item_size, bool floating, Compression how) {
  static CodecScratch writer;
  static CodecScratch reader;
  constexpr size_t guard = 64;
  const Encoded encoded = encode_page(raw, item_size, floating, how, writer);
  const size_t stored = encoded.bytes.size();
  const bool sized = encoded.codec == Codec::raw ? encoded.bytes.data() == raw.data() && stored == raw.size()
                                                 : (raw.size() - stored) * 50 >= raw.size() && stored < raw.size();
  Vector back(raw.size() + 2 * guard, std::byte{0xA5});
  decode_page(encoded.bytes, encoded.codec, item_size, MutableBytes(back).subspan(guard, raw.size()), reader);
  const auto untouched = [](std::byte byte) { return byte == std::byte{0xA5}; };
  const bool guarded = std::all_of(back.begin(), back.begin() + guard, untouched) &&
                       std::all_of(back.end() - guard, back.end(), untouched);
  if (!sized || !guarded || !std::equal(raw.begin(), raw.end(), back.begin() + guard)) {
    FAIL("round trip of ", raw.size(), " bytes, item size ", int{item_size}, ", floating ", floating, ", stored ",
         stored, ", sized ", sized, ", guarded ", guarded);
  }
  return stored;
}

double ratio(Data data, uint8_t item_size, Compression how = Compression::fast) {
  const Vector raw = make(data, mib);
  return static_cast<double>(mib) / static_cast<double>(round_trip(raw, item_size, true, how));
}

bool is_refused(Bytes stored, uint8_t item_size, size_t raw_size, Codec codec = Codec::planes) {
  CodecScratch scratch;
  Vector raw(raw_size);
  try {
    decode_page(stored, codec, item_size, raw, scratch);
  } catch (const CorruptError& error) {
    return std::strlen(error.what()) > 10;
  }
  return false;
}

Vector bytes_of(std::initializer_list<int> values) {
  Vector out;
  for (int value : values) out.push_back(static_cast<std::byte>(value));
  return out;
}

// A page of item size 1 whose only plane is one zstd frame.
Vector zstd_page(const Vector& frame) {
  Vector page = bytes_of({1, 0, 0, 0, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  const auto length = static_cast<uint32_t>(frame.size());
  std::memcpy(page.data() + 8, &length, 4);
  std::memcpy(page.data() + 12, &length, 4);
  page.insert(page.end(), frame.begin(), frame.end());
  return page;
}

Vector zstd_frame(const Vector& content, bool with_size = true) {
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, with_size ? 1 : 0);
  Vector frame(ZSTD_compressBound(content.size()));
  frame.resize(ZSTD_compress2(context, frame.data(), frame.size(), content.data(), content.size()));
  ZSTD_freeCCtx(context);
  return frame;
}

}  // namespace

TEST_CASE("pages of every short length come back") {
  for (Data data : all_data) {
    const Vector raw = make(data, 300);
    for (uint8_t item_size : item_sizes) {
      for (size_t size = 0; size <= raw.size(); ++size) {
        round_trip(Bytes(raw).first(size), item_size, size % 2 == 0, Compression::fast);
        if (size % 8 == 0) round_trip(Bytes(raw).first(size), item_size, true, Compression::small);
      }
    }
  }
}

TEST_CASE("pages around the boundaries of leaves, frames and pages come back") {
  for (Data data : all_data) {
    const Vector raw = make(data, 2 * mib);
    for (uint8_t item_size : item_sizes) {
      for (size_t boundary : {size_t{4096}, size_t{16384}, size_t{131072}, item_size * size_t{131072}, mib}) {
        for (size_t items = 0; items < 3; ++items) {
          const size_t size = boundary - item_size + items * item_size;
          round_trip(Bytes(raw).first(size), item_size, true, Compression::fast);
          round_trip(Bytes(raw).subspan(1, size), item_size, false, Compression::fast);
        }
        if (boundary < mib) round_trip(Bytes(raw).first(boundary + item_size), item_size, true, Compression::small);
      }
    }
  }
}

TEST_CASE("what cannot be split or must not be compressed stays raw") {
  CodecScratch scratch;
  const Vector zeros(4098);
  CHECK(encode_page(zeros, 4, true, Compression::fast, scratch).codec == Codec::raw);
  CHECK(encode_page(zeros, 3, true, Compression::fast, scratch).codec == Codec::raw);
  CHECK(encode_page(zeros, 2, true, Compression::off, scratch).codec == Codec::raw);
  CHECK(encode_page({}, 2, true, Compression::fast, scratch).codec == Codec::raw);
  CHECK(encode_page(make(Data::random, mib), 4, true, Compression::fast, scratch).codec == Codec::raw);
  CHECK(encode_page(zeros, 2, true, Compression::fast, scratch).codec == Codec::planes);
}

TEST_CASE("a page of the largest size comes back") {
  const Vector raw = make(Data::fp32_of_bf16, 64 * mib);
  CHECK(round_trip(raw, 4, true, Compression::fast) < raw.size() / 2);
}

TEST_CASE("trained weights reach the ratios of the design") {
  CHECK(ratio(Data::gaussian_fp32, 4) >= 1.18);
  CHECK(ratio(Data::gaussian_bf16, 2) >= 1.45);
  CHECK(ratio(Data::fp32_of_bf16, 4) >= 2.8);
  CHECK(ratio(Data::sparse, 4) >= 8);
  CHECK(ratio(Data::half_zero, 4) >= 1.18);
  CHECK(ratio(Data::zeros, 4) >= 20000);
  CHECK(ratio(Data::text, 1) >= 1.5);
  CHECK(ratio(Data::text, 1, Compression::small) >= ratio(Data::text, 1));
  CHECK(ratio(Data::gaussian_bf16, 2, Compression::small) >= 1.45);
}

TEST_CASE("equal pages give equal bytes whatever the scratch did before") {
  const Vector raw = make(Data::sparse, mib);
  CodecScratch fresh;
  CodecScratch used;
  encode_page(make(Data::text, mib), 1, false, Compression::small, used);
  encode_page(make(Data::gaussian_fp32, mib), 4, true, Compression::fast, used);
  const Bytes first = encode_page(raw, 4, true, Compression::fast, fresh).bytes;
  const Bytes second = encode_page(raw, 4, true, Compression::fast, used).bytes;
  CHECK(std::ranges::equal(first, second));
}

TEST_CASE("a page written by hand from the format decodes") {
  // Item size 2, rotated; plane 0 RAW, plane 1 CONST 0x7F.
  Vector page = bytes_of({2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0x7F, 0, 0, 0, 0, 0, 0, 0x00, 0x01, 0x80});
  Vector raw(6);
  CodecScratch scratch;
  decode_page(page, Codec::planes, 2, raw, scratch);
  // Rotated values 0x7F00, 0x7F01, 0x7F80; rotated right by one:
  CHECK(raw == bytes_of({0x80, 0x3F, 0x80, 0xBF, 0xC0, 0x3F}));
  page[1] = std::byte{0};
  decode_page(page, Codec::planes, 2, raw, scratch);
  CHECK(raw == bytes_of({0x00, 0x7F, 0x01, 0x7F, 0x80, 0x7F}));
}

TEST_CASE("damaged pages are refused or decode to the right length") {
  struct Case {
    Data data;
    uint8_t item_size;
    size_t size;
  };
  // RAW and ZSTD, CONST twice, LZ4 or ZSTD everywhere, one ZSTD plane.
  for (const Case& c : {Case{Data::gaussian_bf16, 2, 512}, Case{Data::fp32_of_bf16, 4, 640},
                        Case{Data::sparse, 8, 2048}, Case{Data::text, 1, 400}, Case{Data::zeros, 4, 64}}) {
    const Vector raw = make(c.data, c.size);
    CodecScratch scratch;
    const Encoded encoded = encode_page(raw, c.item_size, true, Compression::fast, scratch);
    REQUIRE(encoded.codec == Codec::planes);
    const Vector page(encoded.bytes.begin(), encoded.bytes.end());

    size_t refused = 0;
    Vector mutant = page;
    Vector back(raw.size());
    for (size_t at = 0; at < page.size(); ++at) {
      for (int change = 1; change < 256; ++change) {
        mutant[at] = page[at] ^ static_cast<std::byte>(change);
        try {
          decode_page(mutant, Codec::planes, c.item_size, back, scratch);
        } catch (const CorruptError&) {
          ++refused;
        }
      }
      mutant[at] = page[at];
    }
    CHECK(refused > 0);
    for (size_t size = 0; size < page.size(); ++size) {
      // A copy, so that a sanitizer sees a read behind its end.
      const Vector cut(page.begin(), page.begin() + static_cast<std::ptrdiff_t>(size));
      if (!is_refused(cut, c.item_size, raw.size())) FAIL("cut to ", size, " of ", page.size(), " bytes");
    }
    mutant.push_back(std::byte{0});
    CHECK(is_refused(mutant, c.item_size, raw.size()));
    const bool all_constant = c.data == Data::zeros;  // fits every length; the raw digest tells
    CHECK(is_refused(page, c.item_size, raw.size() + c.item_size) != all_constant);
    CHECK(is_refused(page, c.item_size, raw.size() - c.item_size) != all_constant);
    CHECK(is_refused(page, c.item_size == 1 ? 2 : 1, raw.size()));
    CHECK(is_refused(page, 3, raw.size()));
    CHECK(is_refused(page, c.item_size, raw.size(), Codec::raw));
    CHECK(is_refused(page, c.item_size, raw.size(), static_cast<Codec>(2)));
  }
}

TEST_CASE("only one standard zstd frame with the right content size is taken") {
  const Vector content = make(Data::text, 500);
  const Vector good = zstd_frame(content);
  Vector back(content.size());
  CodecScratch scratch;
  decode_page(zstd_page(good), Codec::planes, 1, back, scratch);
  CHECK(back == content);

  CHECK(is_refused(zstd_page(zstd_frame(content, false)), 1, content.size()));
  CHECK(is_refused(zstd_page(zstd_frame(make(Data::text, 499))), 1, content.size()));
  CHECK(is_refused(zstd_page(zstd_frame(make(Data::text, 501))), 1, content.size()));
  CHECK(is_refused(zstd_page({}), 1, content.size()));
  const Vector skippable = bytes_of({0x50, 0x2A, 0x4D, 0x18, 0, 0, 0, 0});
  Vector before = skippable;
  before.insert(before.end(), good.begin(), good.end());
  CHECK(is_refused(zstd_page(before), 1, content.size()));
  Vector after = good;
  after.insert(after.end(), skippable.begin(), skippable.end());
  CHECK(is_refused(zstd_page(after), 1, content.size()));
  CHECK(is_refused(zstd_page(bytes_of({0x27, 0xB5, 0x2F, 0xFD, 0, 0, 0, 0, 0})), 1, content.size()));  // zstd 0.7
}

TEST_CASE("CRC32C") {
  const std::string digits = "123456789";
  CHECK(crc32c(std::as_bytes(std::span(digits))) == 0xE3069283);
  CHECK(crc32c({}) == 0);
  CHECK(crc32c(Vector(32)) == 0x8A9136AA);  // this one and the next: RFC 3720, B.4
  CHECK(crc32c(Vector(32, std::byte{0xFF})) == 0x62A8AB43);
  const Vector data = make(Data::random, 100);
  for (size_t cut = 0; cut <= data.size(); ++cut) {
    CHECK(crc32c(Bytes(data).subspan(cut), crc32c(Bytes(data).first(cut))) == crc32c(data));
  }
}

TEST_CASE("XXH3") {
  Vector data(100000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>((i * 131 + 7) % 251);
  struct Known {
    size_t size;
    uint64_t short_hash;
    Digest long_hash;
  };
  for (const Known& known : {Known{0, 0x2D06800538D394C2, {0x6001C324468D497F, 0x99AA06D3014798D8}},
                             Known{1, 0x4C5CCA45D0F4811F, {0x4C5CCA45D0F4811F, 0x495B62073EF70CA4}},
                             Known{16, 0x945D7A2E39182D35, {0x3AD9B09B55FF159D, 0x2EA9B26E0DE3C129}},
                             Known{129, 0x8BF7E91C7EB2F2D6, {0xF316461FF6B978D7, 0xEAC1039C6FBF7B8C}},
                             Known{241, 0x246C5FE4ED1436A3, {0x246C5FE4ED1436A3, 0xB4125661642A66F9}},
                             Known{16384, 0xA7C7EA65F6A75D1A, {0xA7C7EA65F6A75D1A, 0xFD7AA8CF824AE7D0}},
                             Known{100000, 0xD61C58CE093C4EA0, {0xD61C58CE093C4EA0, 0x0AF6B8609F8D1F2E}}}) {
    CHECK(xxh3(Bytes(data).first(known.size)) == known.short_hash);
    CHECK(xxh3_128(Bytes(data).first(known.size)) == known.long_hash);
    uint64_t base[2];
    xxh_base.hash128(data.data(), known.size, base);
    CHECK(Digest{base[0], base[1]} == known.long_hash);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) CHECK(xxh_avx2.hash64(data.data(), known.size) == known.short_hash);
#endif
  }
}

TEST_CASE("tree digests follow their definition") {
  const Vector data = make(Data::random, 3 * mib / 2);
  for (size_t leaf : {page_leaf, manifest_leaf, size_t{1000}}) {
    for (size_t size : {size_t{0}, size_t{1}, leaf - 1, leaf, leaf + 1, 64 * leaf, 65 * leaf + 3, data.size()}) {
      const Bytes part = Bytes(data).first(std::min(size, data.size()));
      std::vector<uint64_t> words;
      for (size_t at = 0; at < part.size(); at += leaf) {
        words.push_back(xxh3(part.subspan(at, std::min(leaf, part.size() - at))));
      }
      CHECK(tree_root(words, part.size()) == tree_digest(part, leaf));
      words.push_back(part.size());
      CHECK(xxh3_128(std::as_bytes(std::span(words))) == tree_digest(part, leaf));
    }
  }
}

TEST_CASE("an I/O error says what failed, where and why") {
  const IoError error("write", "/path", 28);
  CHECK(std::string(error.what()).starts_with("write /path: No space left on device ("));
  CHECK(error.code == 28);
  CHECK(std::string(IoError("read", "x", 99999).what()).find("99999") != std::string::npos);
}

}  // namespace tierload
