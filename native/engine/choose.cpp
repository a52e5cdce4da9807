// Whether compression pays here: where encoding is faster than the device.
#include <algorithm>
#include <chrono>

#include "tierload/digest.h"
#include "tierload/engine.h"

namespace tierload {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t samples_max = 8;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Compression choose_compression(std::span<const PageSource> sources, unsigned threads, double device_rate) {
  // Pages that lie together in memory, from all over the state; packed ones are small and few.
  std::vector<const PageSource*> pages;
  for (const PageSource& source : sources) {
    if (source.parts.size() == 1 && source.parts[0].view == nullptr) pages.push_back(&source);
  }
  CodecScratch scratch;
  double encoding = 0;
  double hashing = 0;
  uint64_t raw = 0;
  uint64_t stored = 0;
  const size_t samples = std::min(samples_max, pages.size());
  for (size_t i = 0; i < samples; ++i) {
    const PageSource& page = *pages[(i * pages.size() + pages.size() / 2) / samples];
    const Bytes bytes(page.parts[0].base, page.parts[0].length);
    auto start = Clock::now();
    tree_digest(bytes, page_leaf);
    hashing += seconds_since(start);
    start = Clock::now();
    const Encoded encoded = encode_page(bytes, page.item_size, page.floating, Compression::fast, scratch);
    if (encoded.codec != Codec::raw) tree_digest(encoded.bytes, page_leaf);
    encoding += seconds_since(start);
    raw += bytes.size();
    stored += encoded.bytes.size();
  }
  if (raw == 0 || stored == raw) return Compression::fast;  // nothing to lose: such pages are stored as they are
  // Workers and device work at the same time, so the slower one of the two tells how long a byte takes.
  const double workers = std::max(threads, 1u);
  const double bytes = static_cast<double>(raw);
  const double compressed = std::max((hashing + encoding) / workers, static_cast<double>(stored) / device_rate);
  const double plain = std::max(hashing / workers, bytes / device_rate);
  return compressed <= plain ? Compression::fast : Compression::off;
}

}  // namespace tierload
