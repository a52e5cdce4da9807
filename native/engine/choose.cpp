// Whether compression pays here: where encoding is faster than the device; and for hot pages, decoding.
#include <time.h>

#include <algorithm>

#include "engine/page_bytes.h"
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

constexpr size_t fetched_share = 16;  // at most one page in so many is fetched from an accelerator to be tried

// Some pages that lie together in memory, from all over the state; packed ones are small and few.
std::vector<size_t> sample_pages(const Sampling& sampling, bool hot) {
  std::vector<size_t> pages;
  size_t most = sampling.most;
  for (size_t page = 0; page < sampling.sources.size(); ++page) {
    const PageSource& source = sampling.sources[page];
    if ((hot && !source.hot) || (!sampling.known.empty() && sampling.known[page])) continue;
    if (source.parts.size() == 1 && source.parts[0].view == nullptr && !source.packed) pages.push_back(page);
  }
  if (!pages.empty() && device_of(sampling.sources[pages[0]]) != 0) {
    most = std::min(most, pages.size() / fetched_share + 1);
  }
  const size_t count = std::min(most, pages.size());
  std::vector<size_t> samples;
  for (size_t i = 0; i < count; ++i) samples.push_back(pages[(i * pages.size() + pages.size() / 2) / count]);
  return samples;
}

// The bytes of sampled pages, once they are there, one at a time.
class Sampled {
 public:
  explicit Sampled(const Sampling& sampling) : sampling_(sampling) {}
  Bytes of(size_t page) {
    if (sampling_.gate != nullptr) sampling_.gate->wait(page);
    return bytes_.of(sampling_.sources[page], lanes_);
  }

 private:
  const Sampling& sampling_;
  PageBytes bytes_;
  Lanes lanes_;
};

}  // namespace

Compression choose_compression(const Sampling& sampling, unsigned threads, double device_rate) {
  const std::vector<size_t> samples = sample_pages(sampling, false);
  Sampled sampled(sampling);
  CodecScratch scratch;
  double encoding = 0;
  double hashing = 0;
  uint64_t raw = 0;
  uint64_t stored = 0;
  for (const size_t number : samples) {
    const PageSource& page = sampling.sources[number];
    const Bytes bytes = sampled.of(number);
    if (number == samples[0]) {  // the first time, it finds no memory to work in yet
      encode_page(bytes, page.item_size, page.floating, Compression::fast, scratch);
    }
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

bool raw_loads_faster(const Sampling& sampling, unsigned threads, double read_rate) {
  Sampled sampled(sampling);
  CodecScratch encoder;
  CodecScratch decoder;
  std::vector<std::byte> decoded;
  double decoding = 0;  // and the digest of what is stored, which only pages that are not raw have besides
  double hashing = 0;
  uint64_t raw = 0;
  uint64_t stored = 0;
  for (const size_t number : sample_pages(sampling, true)) {
    const PageSource& page = sampling.sources[number];
    const Bytes bytes = sampled.of(number);
    const Encoded encoded = encode_page(bytes, page.item_size, page.floating, Compression::fast, encoder);
    if (encoded.codec == Codec::raw) continue;  // it is raw in any case
    decoded.resize(bytes.size());
    decode_page(encoded.bytes, encoded.codec, page.item_size, decoded, decoder);  // touches what it works in
    double start = seconds_of_work();
    tree_digest(encoded.bytes, page_leaf);
    decode_page(encoded.bytes, encoded.codec, page.item_size, decoded, decoder);
    decoding += seconds_of_work() - start;
    start = seconds_of_work();
    tree_digest(bytes, page_leaf);
    hashing += seconds_of_work() - start;
    raw += bytes.size();
    stored += encoded.bytes.size();
  }
  if (raw == 0) return false;
  // A load is as slow as the slower one of device and workers, like a save.
  const double workers = std::max(threads, 1u);
  const double plain = std::max(hashing / workers, static_cast<double>(raw) / read_rate);
  const double compressed = std::max((hashing + decoding) / workers, static_cast<double>(stored) / read_rate);
  return plain <= compressed;
}

}  // namespace tierload
