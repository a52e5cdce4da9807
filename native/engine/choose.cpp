// Whether compression pays here: where encoding is faster than the device.
#include <time.h>

#include <algorithm>

#include "tierload/digest.h"
#include "tierload/engine.h"

namespace tierload {
namespace {

// Of this thread's own: what others do on the machine at this moment says nothing about the state, and the choice
// should be the same in every save.
double seconds_of_work() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

Compression choose_compression(std::span<const PageSource> sources, PageGate* gate, unsigned threads,
                               double device_rate, size_t most_samples) {
  // Pages that lie together in memory, from all over the state; packed ones are small and few.
  std::vector<size_t> pages;
  for (size_t page = 0; page < sources.size(); ++page) {
    const PageSource& source = sources[page];
    if (source.parts.size() == 1 && source.parts[0].view == nullptr && !source.packed) pages.push_back(page);
  }
  CodecScratch scratch;
  double encoding = 0;
  double hashing = 0;
  uint64_t raw = 0;
  uint64_t stored = 0;
  const size_t samples = std::min(most_samples, pages.size());
  if (samples > 0) {  // the first one finds no memory to work in yet, and does not count
    if (gate != nullptr) gate->wait(pages[0]);
    const PageSource& page = sources[pages[0]];
    encode_page({page.parts[0].base, page.parts[0].length}, page.item_size, page.floating, Compression::fast, scratch);
  }
  for (size_t i = 0; i < samples; ++i) {
    const size_t number = pages[(i * pages.size() + pages.size() / 2) / samples];
    const PageSource& page = sources[number];
    if (gate != nullptr) gate->wait(number);
    const Bytes bytes(page.parts[0].base, page.parts[0].length);
    double start = seconds_of_work();
    tree_digest(bytes, page_leaf);
    hashing += seconds_of_work() - start;
    start = seconds_of_work();
    const Encoded encoded = encode_page(bytes, page.item_size, page.floating, Compression::fast, scratch);
    if (encoded.codec != Codec::raw) tree_digest(encoded.bytes, page_leaf);
    encoding += seconds_of_work() - start;
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
