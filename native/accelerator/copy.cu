// Copies of many runs at a time, on the accelerator.
#include "tile.h"

template <typename Word>
static __device__ void copy_words(const Tile& tile) {
  const Word* const from = (const Word*)tile.from;
  Word* const into = (Word*)tile.into;
  const u64 words = tile.length / sizeof(Word), step = blockDim.x;
  u64 i = threadIdx.x;
  for (; i + 3 * step < words; i += 4 * step) {  // four loads are under way before the first is stored
    const Word a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    into[i] = a;
    into[i + step] = b;
    into[i + 2 * step] = c;
    into[i + 3 * step] = d;
  }
  for (; i < words; i += step) into[i] = from[i];
}

struct alignas(16) Word16 {
  u64 low, high;
};

// A block a tile, in the widest words that suit it.
extern "C" __global__ void tierload_copy(const Tile* tiles) {
  const Tile tile = tiles[blockIdx.x];
  const u64 bits = tile.from | tile.into | tile.length;
  if ((bits & 15) == 0) return copy_words<Word16>(tile);
  if ((bits & 7) == 0) return copy_words<u64>(tile);
  if ((bits & 3) == 0) return copy_words<u32>(tile);
  copy_words<u8>(tile);
}
