// Encoding of one page; decode.cpp has the other direction.
//
// The planes are split to where they stand in an encoded page whose planes are all RAW, behind room for the longest
// header. Then each plane in turn is replaced by its stored bytes, which move down to the end of the one before; in
// float pages the leading planes are RAW and never move. The header goes right before the first plane at the end.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "codec/entropy.h"
#include "codec/layout.h"
#include "codec/planes.h"
#include "codec/scratch.h"

namespace tierload {
namespace {

constexpr double noise_bits = 7.75;  // above it, Huffman coding saves 3% at best
constexpr double mostly_one_value = 0.5;
constexpr size_t probe_runs = 4;
constexpr size_t probe_run_bytes = 8 * 1024;

// At least 2% smaller: less is not worth a decoder's time.
size_t largest_that_pays(size_t size) { return size - (size + 49) / 50; }

enum class Outlook {
  one_value,  // perhaps CONST: the whole plane has to be looked at
  noise,      // RAW
  skewed,     // Huffman coding, and nothing else: an exponent plane
  open,       // only a trial shows what is best
};

constexpr size_t cache_line = 64;

// The first place at or after `from` in `bytes` that begins a cache line.
size_t aligned_from(Bytes bytes, size_t from) {
  const auto address = reinterpret_cast<uintptr_t>(bytes.data()) + from;
  return from + (cache_line - address % cache_line) % cache_line;
}

Outlook judge(Bytes sample, bool floating) {
  const ByteStatistics statistics = count_bytes(sample);
  if (statistics.top_share == 1) return Outlook::one_value;
  if (statistics.entropy_bits > noise_bits) return Outlook::noise;
  return floating && statistics.top_share < mostly_one_value ? Outlook::skewed : Outlook::open;
}

using Outlooks = std::array<Outlook, item_size_max>;
using PlanePointers = std::array<std::byte*, item_size_max>;

PlanePointers plane_pointers(std::byte* first, size_t plane_bytes, size_t item_size) {
  PlanePointers planes{};
  for (size_t p = 0; p < item_size; ++p) planes[p] = first + p * plane_bytes;
  return planes;
}

// What a sample of the page says about all of it.
struct Guess {
  bool rotate = false;
  Outlooks outlooks;
};

// Splits a sample, in the scratch; planes behind the item size are empty.
std::array<Bytes, item_size_max> split_sample(Bytes sample, size_t item_size, bool rotate, MutableBytes room) {
  const PlanePointers planes = plane_pointers(room.data(), sample_items_max, item_size);
  split_planes(sample, rotate, std::span(planes).first(item_size));
  std::array<Bytes, item_size_max> out;
  for (size_t p = 0; p < item_size; ++p) out[p] = {planes[p], sample.size() / item_size};
  return out;
}

// Where all signs are equal, as in AdamW's second moment, rotation would leave 7 bits of noise and a constant one in
// the plane below the exponent's: 12% of it to save, by Huffman codes that take longest of all to decode. Without
// rotation that plane is 8 bits of noise and stored as it is, and the exponent's plane is smaller by as much: pages are
// 0.2% larger and decode 2.3 times as fast.
bool has_both_signs(Bytes sample, size_t item_size) {
  unsigned any = 0;
  unsigned all = 0xFF;
  for (size_t top = item_size - 1; top < sample.size(); top += item_size) {
    any |= std::to_integer<unsigned>(sample[top]);
    all &= std::to_integer<unsigned>(sample[top]);
  }
  return ((any ^ all) & 0x80) != 0;
}

Guess guess(Bytes raw, size_t item_size, bool floating, Compression how, CodecScratch::Impl& scratch) {
  constexpr size_t half = sample_items_max * item_size_max;
  const MutableBytes room = scratch.sample.reserve(2 * half);
  Guess guess;
  guess.outlooks.fill(Outlook::noise);
  // Random bytes, encrypted or compressed already, must cost next to nothing; short pages are not worth two looks.
  if (raw.size() / item_size > sample_items_max) {
    const Bytes glance = sample_page(raw, item_size, glance_spread, room);
    const auto planes = split_sample(glance, item_size, false, room.subspan(half));
    // From the top, which is the least random plane of numbers.
    if (std::all_of(planes.rend() - static_cast<std::ptrdiff_t>(item_size), planes.rend(), looks_random)) return guess;
  }
  const Bytes sample = sample_page(raw, item_size, sample_spread, room);
  guess.rotate = floating && item_size > 1 && (how == Compression::small || has_both_signs(sample, item_size));
  const auto planes = split_sample(sample, item_size, guess.rotate, room.subspan(half));
  for (size_t p = 0; p < item_size; ++p) guess.outlooks[p] = judge(planes[p], floating);
  return guess;
}

// A few long runs of a plane, so that repeats show. All of a short one.
Bytes sample_plane(Bytes plane, CodecScratch::Impl& scratch) {
  if (plane.size() <= probe_runs * probe_run_bytes) return plane;
  const MutableBytes sample = scratch.sample.reserve(probe_runs * probe_run_bytes);
  for (size_t run = 0; run < probe_runs; ++run) {
    const size_t from = (plane.size() - probe_run_bytes) * run / (probe_runs - 1);
    std::memcpy(sample.data() + run * probe_run_bytes, plane.data() + from, probe_run_bytes);
  }
  return sample;
}

Method choose_method(Bytes plane, Outlook outlook, Compression how, MutableBytes room, CodecScratch::Impl& scratch) {
  if (outlook == Outlook::skewed) return Method::huffman;
  const Bytes sample = sample_plane(plane, scratch);
  const auto trial = [&](Method method) {
    const size_t before = scratch.lengths.size();
    const auto size = scratch.coder.encode(method, sample, room, scratch.lengths);
    scratch.lengths.resize(before);
    return size.value_or(sample.size());
  };
  // What decodes faster wins while it is larger by at most a disk block (4 KiB) in a page of 1 MiB.
  const size_t slack = how == Compression::fast ? sample.size() / 256 : 0;
  const Method searching = how == Compression::fast ? Method::search : Method::thorough;
  const size_t huffman = trial(Method::huffman);
  const size_t search = trial(searching);
  const size_t lz4 = trial(Method::lz4);
  if (lz4 <= std::min(huffman, search) + slack) return Method::lz4;
  return huffman <= search + slack ? Method::huffman : searching;
}

struct StoredPlane {
  PlaneHeader header;
  Bytes bytes;
};

// The plane's stored bytes: none, the plane itself, or frames in the scratch. Appends the frames' lengths.
StoredPlane encode_plane(Bytes plane, Outlook outlook, Compression how, CodecScratch::Impl& scratch) {
  const StoredPlane as_is = {{PlaneKind::raw, std::byte{}, 0, static_cast<uint32_t>(plane.size())}, plane};
  if (outlook == Outlook::noise) return as_is;
  if (outlook == Outlook::one_value && is_constant(plane)) return {{PlaneKind::constant, plane[0], 0, 0}, {}};
  const MutableBytes room = scratch.frames.reserve(largest_that_pays(plane.size()));
  Method method = choose_method(plane, outlook, how, room, scratch);
  auto size = scratch.coder.encode(method, plane, room, scratch.lengths);
  if (!size && method != Method::huffman) {  // the trial's runs were not like the rest
    method = Method::huffman;
    size = scratch.coder.encode(method, plane, room, scratch.lengths);
  }
  if (!size) return as_is;
  const auto frames = static_cast<uint16_t>(frame_count(plane.size()));
  return {{kind_of(method), std::byte{}, frames, static_cast<uint32_t>(*size)}, room.first(*size)};
}

Bytes encode_planes(Bytes raw, size_t item_size, bool rotate, const Outlooks& outlooks, Compression how,
                    CodecScratch::Impl& scratch) {
  const size_t plane_bytes = raw.size() / item_size;
  const size_t header_room = header_bytes(item_size, item_size * frame_count(plane_bytes));
  const MutableBytes page = scratch.page.reserve(header_room + cache_line + raw.size());
  // Stores that cross cache lines would halve the speed of the widest vectors.
  const size_t first = aligned_from(page, header_room);
  const PlanePointers planes = plane_pointers(page.data() + first, plane_bytes, item_size);
  split_planes(raw, rotate, std::span(planes).first(item_size));

  PageHeader header = {static_cast<uint8_t>(item_size), rotate, {}};
  scratch.lengths.clear();
  size_t end = first;
  for (size_t p = 0; p < item_size; ++p) {
    const StoredPlane stored = encode_plane(Bytes(planes[p], plane_bytes), outlooks[p], how, scratch);
    header.planes[p] = stored.header;
    std::byte* const to = page.data() + end;
    if (stored.bytes.data() != to && !stored.bytes.empty()) std::memmove(to, stored.bytes.data(), stored.bytes.size());
    end += stored.bytes.size();
  }
  const size_t start = first - header_bytes(item_size, scratch.lengths.size());
  write_header(header, scratch.lengths, page.subspan(start));
  return page.subspan(start, end - start);
}

}  // namespace

CodecScratch::CodecScratch() : impl(std::make_unique<Impl>()) {}
CodecScratch::~CodecScratch() = default;

Encoded encode_page(Bytes raw, uint8_t item_size, bool floating, Compression how, CodecScratch& scratch) {
  const Encoded as_is = {Codec::raw, raw};
  if (how == Compression::off || raw.empty() || raw.size() > page_bytes_max || !is_item_size(item_size) ||
      raw.size() % item_size != 0) {
    return as_is;
  }
  const auto [rotate, outlooks] = guess(raw, item_size, floating, how, *scratch.impl);
  if (std::ranges::all_of(outlooks, [](Outlook outlook) { return outlook == Outlook::noise; })) return as_is;
  const Bytes encoded = encode_planes(raw, item_size, rotate, outlooks, how, *scratch.impl);
  if (encoded.size() > largest_that_pays(raw.size())) return as_is;
  return {Codec::planes, encoded};
}

}  // namespace tierload
