// One page of raw bytes to one encoded page and back, as docs/FORMAT.md section 7 defines them.
// Pure functions of bytes: no files, no threads, no policy beyond what is passed in.
#pragma once

#include <cstdint>
#include <memory>

#include "tierload/storage.h"

namespace tierload {

enum class Codec : uint8_t { raw = 0, planes = 1 };

enum class Compression { off, fast, small };

// Scratch memory of one worker thread; reused from page to page, so that the steady state allocates nothing.
class CodecScratch {
 public:
  CodecScratch();
  ~CodecScratch();
  CodecScratch(const CodecScratch&) = delete;
  CodecScratch& operator=(const CodecScratch&) = delete;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

struct Encoded {
  Codec codec;
  Bytes bytes;  // for `raw` the input itself, else memory in the scratch, valid until its next use
};

// Encodes `raw` (at most 64 MiB). `item_size` is 1, 2, 4 or 8; `floating` says that items are floats of that size,
// so that the sign is rotated out of the exponent where signs differ. Falls back to raw when less than 2% would be
// saved, when raw.size() is not a multiple of item_size, or with Compression::off. Never throws for any input bytes.
Encoded encode_page(Bytes raw, uint8_t item_size, bool floating, Compression how, CodecScratch& scratch);

// Decodes `stored` into exactly `raw.size()` bytes. The input may be hostile: every bound is checked before any
// memory is touched, and memory use does not depend on what the input claims. Throws CorruptError.
void decode_page(Bytes stored, Codec codec, uint8_t item_size, MutableBytes raw, CodecScratch& scratch);

}  // namespace tierload
