// What a CodecScratch owns. Everything grows to the largest page seen and stays.
#pragma once

#include <memory>
#include <vector>

#include "codec/frames.h"
#include "tierload/codec.h"

namespace tierload {

class Buffer {
 public:
  // At least `size` bytes, whatever was in them; the earlier span is void.
  MutableBytes reserve(size_t size) {
    if (size > size_) {
      bytes_ = std::make_unique_for_overwrite<std::byte[]>(size);
      size_ = size;
    }
    return {bytes_.get(), size};
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_ = 0;
};

struct CodecScratch::Impl {
  Buffer sample;                  // encoding: the sample of a page, then that of a plane
  Buffer page;                    // encoding: the planes, which become the encoded page in place
  Buffer frames;                  // encoding: one plane's frames; decoding: one frame of each plane
  std::vector<uint32_t> lengths;  // encoding: stored length of every frame so far
  FrameCoder coder;
};

}  // namespace tierload
