#include "codec/frames.h"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>

#include "codec/literals.h"
#include "tierload/error.h"

namespace tierload {
namespace {

struct FreeCompressor {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};
struct FreeDecompressor {
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};
using Compressor = std::unique_ptr<ZSTD_CCtx, FreeCompressor>;
using Decompressor = std::unique_ptr<ZSTD_DCtx, FreeDecompressor>;

// The settings are constants: a library that refuses one is not a library to write with.
void set(ZSTD_CCtx* context, ZSTD_cParameter parameter, int value) {
  const size_t result = ZSTD_CCtx_setParameter(context, parameter, value);
  if (ZSTD_isError(result)) throw Error(std::string("zstd refuses a setting: ") + ZSTD_getErrorName(result));
}

void set_huffman(ZSTD_CCtx* context) {
  set(context, ZSTD_c_windowLog, 17);
  set(context, ZSTD_c_hashLog, 6);
  set(context, ZSTD_c_minMatch, 7);
  set(context, ZSTD_c_strategy, ZSTD_fast);
  // The target length is the fast strategy's stride: the largest one skips the search (1.4 times as fast), but by
  // default also switches Huffman coding off. ZSTD_c_literalCompressionMode = ZSTD_ps_enable asks for it all the
  // same; zstd declares that name for static linking only, and a library may not know it.
  const bool asked = !ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_experimentalParam5, 1));
  set(context, ZSTD_c_targetLength, asked ? ZSTD_cParam_getBounds(ZSTD_c_targetLength).upperBound : 0);
}

Compressor make_compressor(Method method) {
  Compressor made(ZSTD_createCCtx());
  if (made == nullptr) throw std::bad_alloc();
  if (method == Method::huffman) set_huffman(made.get());
  if (method == Method::search) set(made.get(), ZSTD_c_compressionLevel, 1);
  if (method == Method::thorough) set(made.get(), ZSTD_c_compressionLevel, 6);
  return made;
}

[[noreturn]] void refuse(const char* kind, FramePosition position, const std::string& found) {
  throw CorruptError(std::string(kind) + " frame " + std::to_string(position.frame) + " of plane " +
                     std::to_string(position.plane) + ": " + found);
}

}  // namespace

struct FrameCoder::Contexts {
  std::array<Compressor, 4> compressors;  // by Method, made when first needed; LZ4's stays empty
  std::unique_ptr<std::byte[]> lz4_state;
  Decompressor decompressor;
  LiteralDecoder literals;
};

FrameCoder::FrameCoder() : contexts_(std::make_unique<Contexts>()) {}
FrameCoder::~FrameCoder() = default;

std::optional<size_t> FrameCoder::encode(Method method, Bytes plane, MutableBytes out, std::vector<uint32_t>& lengths) {
  const size_t lengths_before = lengths.size();
  size_t total = 0;
  for (size_t at = 0; at < plane.size(); at += frame_bytes) {
    const Bytes frame = plane.subspan(at, std::min(frame_bytes, plane.size() - at));
    const MutableBytes room = out.subspan(total);
    size_t length = 0;
    if (method == Method::lz4) {
      if (contexts_->lz4_state == nullptr) {
        contexts_->lz4_state = std::make_unique<std::byte[]>(static_cast<size_t>(LZ4_sizeofState()));
      }
      const int capacity = static_cast<int>(std::min<size_t>(room.size(), 2 * frame_bytes));
      length = static_cast<size_t>(LZ4_compress_fast_extState(
          contexts_->lz4_state.get(), reinterpret_cast<const char*>(frame.data()), reinterpret_cast<char*>(room.data()),
          static_cast<int>(frame.size()), capacity, 1));
    } else {
      Compressor& compressor = contexts_->compressors[static_cast<size_t>(method)];
      if (compressor == nullptr) compressor = make_compressor(method);
      length = ZSTD_compress2(compressor.get(), room.data(), room.size(), frame.data(), frame.size());
      if (ZSTD_isError(length)) length = 0;
    }
    if (length == 0) {  // it does not fit; neither library makes an empty frame
      lengths.resize(lengths_before);
      return std::nullopt;
    }
    lengths.push_back(static_cast<uint32_t>(length));
    total += length;
  }
  return total;
}

namespace {

void decode_lz4(Bytes frame, MutableBytes out, FramePosition position) {
  // Far beyond LZ4's own worst case; it keeps the length within int.
  if (frame.size() > 2 * frame_bytes) refuse("LZ4", position, std::to_string(frame.size()) + " bytes are too many");
  const int got = LZ4_decompress_safe(reinterpret_cast<const char*>(frame.data()), reinterpret_cast<char*>(out.data()),
                                      static_cast<int>(frame.size()), static_cast<int>(out.size()));
  if (got < 0) refuse("LZ4", position, "broken near byte " + std::to_string(-static_cast<int64_t>(got)));
  if (static_cast<size_t>(got) != out.size()) {
    refuse("LZ4", position, "holds " + std::to_string(got) + " bytes, not " + std::to_string(out.size()));
  }
}

// Exactly one standard frame with the right content size: older zstd formats and skippable frames, which
// ZSTD_decompressDCtx would also take (and allocate for), are refused before it is called.
void check_zstd(Bytes frame, size_t content, FramePosition position) {
  constexpr uint32_t magic = ZSTD_MAGICNUMBER;
  uint32_t found = 0;
  std::memcpy(&found, frame.data(), std::min(frame.size(), sizeof found));
  if (found != magic) refuse("zstd", position, "wrong magic number");
  const unsigned long long claimed = ZSTD_getFrameContentSize(frame.data(), frame.size());
  if (claimed == ZSTD_CONTENTSIZE_ERROR) refuse("zstd", position, "broken header");
  if (claimed == ZSTD_CONTENTSIZE_UNKNOWN) refuse("zstd", position, "has no content size");
  if (claimed != content) {
    refuse("zstd", position, "says it holds " + std::to_string(claimed) + " bytes, not " + std::to_string(content));
  }
  const size_t length = ZSTD_findFrameCompressedSize(frame.data(), frame.size());
  if (ZSTD_isError(length)) refuse("zstd", position, ZSTD_getErrorName(length));
  if (length != frame.size()) {
    refuse("zstd", position, "ends after " + std::to_string(length) + " of " + std::to_string(frame.size()) + " bytes");
  }
}

// Where a LiteralDecoder is worth its tables: in long frames, and with codes of 6.5 bits or less on average, of which
// look-ups still give two as a rule.
bool suits_literal_decoder(Bytes frame, MutableBytes out) {
  constexpr size_t shortest = 32 * 1024;
  return out.size() >= shortest && frame.size() <= out.size() / 16 * 13;
}

}  // namespace

void FrameCoder::decode(PlaneKind kind, Bytes frame, MutableBytes out, FramePosition position) {
  if (kind == PlaneKind::lz4) return decode_lz4(frame, out, position);
  if (suits_literal_decoder(frame, out) && contexts_->literals.decode(frame, out)) return;
  check_zstd(frame, out.size(), position);
  if (contexts_->decompressor == nullptr) {
    contexts_->decompressor.reset(ZSTD_createDCtx());
    if (contexts_->decompressor == nullptr) throw std::bad_alloc();
  }
  const size_t got =
      ZSTD_decompressDCtx(contexts_->decompressor.get(), out.data(), out.size(), frame.data(), frame.size());
  if (ZSTD_isError(got)) refuse("zstd", position, ZSTD_getErrorName(got));
  if (got != out.size())
    refuse("zstd", position, "holds " + std::to_string(got) + " bytes, not " + std::to_string(out.size()));
}

}  // namespace tierload
