// libFuzzer target: LiteralDecoder against zstd. Whatever the first takes, the second takes too, and both give the
// same. Byte 0: 0 (modulo 4): the rest is a frame. Else the rest, repeated out of order, is compressed as the encoder
// does it; bytes 1-3 are a place in that frame, modulo its length, and what is changed there.
#include "codec/literals.h"

#include <zstd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "codec/frames.h"

namespace {

using namespace tierload;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "literals fuzzer: %s\n", what);
  std::abort();
}

// Returns whether the fast way took it.
bool compare(Bytes frame, size_t content) {
  static LiteralDecoder literals;
  // Exactly as large as what they hold, so that the sanitizer sees every byte beyond.
  const auto stored = std::make_unique<std::byte[]>(frame.size());
  if (!frame.empty()) std::memcpy(stored.get(), frame.data(), frame.size());
  const auto out = std::make_unique<std::byte[]>(content);
  if (!literals.decode({stored.get(), frame.size()}, {out.get(), content})) return false;
  std::vector<std::byte> expected(content);
  const size_t size = ZSTD_decompress(expected.data(), content, frame.data(), frame.size());
  require(size == content, "a frame that zstd refuses was taken");
  require(std::memcmp(expected.data(), out.get(), content) == 0, "not what zstd makes of it");
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t head = 4;
  if (size <= head) return 0;
  const Bytes rest(reinterpret_cast<const std::byte*>(data) + head, size - head);
  if (data[0] % 4 == 0) {
    const unsigned long long content = ZSTD_getFrameContentSize(rest.data(), rest.size());
    if (content <= frame_bytes) compare(rest, static_cast<size_t>(content));
    return 0;
  }
  static FrameCoder coder;
  constexpr size_t content_max = 8 * 1024;  // many rounds of the fast way, and many inputs a second
  std::vector<std::byte> content(std::min(rest.size() * data[0], content_max));
  for (size_t i = 0; i < content.size(); ++i) content[i] = rest[i * (i + 7) / 3 % rest.size()];
  std::vector<std::byte> frame(ZSTD_compressBound(content.size()));
  std::vector<uint32_t> lengths;
  frame.resize(coder.encode(Method::huffman, content, frame, lengths).value());
  compare(frame, content.size());
  frame[(data[1] | size_t{data[2]} << 8) % frame.size()] ^= static_cast<std::byte>(data[3]);
  compare(frame, content.size());
  return 0;
}
