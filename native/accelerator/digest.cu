// The digests of leaves, on the accelerator. XXH3 follows its specification, with the default secret and no seed
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
#include "tile.h"

constexpr int lanes = 8;  // threads that work at one leaf, which has as many accumulators
constexpr u64 leaf_bytes = 16384;
constexpr int secret_bytes = 192;

static __device__ const u8 secret_of_xxh3[secret_bytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr u64 prime32_1 = 0x9E3779B1u, prime32_2 = 0x85EBCA77u, prime32_3 = 0xC2B2AE3Du;
constexpr u64 prime64_1 = 0x9E3779B185EBCA87ull, prime64_2 = 0xC2B2AE3D27D4EB4Full;
constexpr u64 prime64_3 = 0x165667B19E3779F9ull, prime64_4 = 0x85EBCA77C2B2AE63ull;
constexpr u64 prime64_5 = 0x27D4EB2F165667C5ull;

// ---- Loads at any address -------------------------------------------------------------------------------------------

static __device__ u32 load32(const u8* at) {
  return (u32)at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

// Of a word that is not aligned, from the two aligned ones that it lies in.
static __device__ u64 load64(const u8* at) {
  const u64* const word = (const u64*)((u64)at & ~7ull);
  const u64 shift = ((u64)at & 7) * 8;
  return shift == 0 ? word[0] : word[0] >> shift | word[1] << (64 - shift);
}

// ---- XXH3-64 --------------------------------------------------------------------------------------------------------

static __device__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

static __device__ u64 avalanche(u64 h) {
  h ^= h >> 37;
  h *= 0x165667919E3779F9ull;
  return h ^ (h >> 32);
}

static __device__ u64 swap64(u64 x) {
  u64 out = 0;
  for (int i = 0; i < 8; ++i) out |= (x >> (8 * i) & 0xFF) << (8 * (7 - i));
  return out;
}

static __device__ u64 mix16(const u8* at, const u8* secret) {
  return fold(load64(at) ^ load64(secret), load64(at + 8) ^ load64(secret + 8));
}

// Up to 240 bytes, by one thread.
static __device__ u64 digest_short(const u8* at, u64 length, const u8* secret) {
  if (length <= 3) {
    const u32 first = at[0], middle = at[length >> 1], last = at[length - 1];
    u64 h = (first << 16 | middle << 24 | last | (u32)length << 8) ^ (u64)(load32(secret) ^ load32(secret + 4));
    h ^= h >> 33;
    h *= prime64_2;
    h ^= h >> 29;
    h *= prime64_3;
    return h ^ (h >> 32);
  }
  if (length <= 8) {
    const u64 both = load32(at + length - 4) + ((u64)load32(at) << 32);
    u64 h = both ^ load64(secret + 8) ^ load64(secret + 16);
    h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
    h *= 0x9FB21C651E98DF25ull;
    h ^= (h >> 35) + length;
    h *= 0x9FB21C651E98DF25ull;
    return h ^ (h >> 28);
  }
  if (length <= 16) {
    const u64 low = load64(at) ^ load64(secret + 24) ^ load64(secret + 32);
    const u64 high = load64(at + length - 8) ^ load64(secret + 40) ^ load64(secret + 48);
    return avalanche(length + swap64(low) + high + fold(low, high));
  }
  u64 sum = length * prime64_1;
  if (length <= 128) {
    for (int i = (int)(length - 1) / 32; i >= 0; --i) {
      sum += mix16(at + 16 * i, secret + 32 * i);
      sum += mix16(at + length - 16 * (i + 1), secret + 32 * i + 16);
    }
    return avalanche(sum);
  }
  for (int i = 0; i < 8; ++i) sum += mix16(at + 16 * i, secret + 16 * i);
  sum = avalanche(sum);
  for (int i = 8; i < (int)(length / 16); ++i) sum += mix16(at + 16 * i, secret + 16 * (i - 8) + 3);
  return avalanche(sum + mix16(at + length - 16, secret + 136 - 17));
}

// One stripe of 64 bytes: this lane's 8 of them go into its own accumulator and, as they are, into its neighbour's.
static __device__ void accumulate(u64& sum, u64 value, u64 key, u32 group) {
  const u64 keyed = value ^ key;
  sum += (u64)(u32)keyed * (keyed >> 32) + __shfl_xor_sync(group, value, 1);
}

// More than 240 bytes, by the eight threads of one leaf; all of them are in `group`.
static __device__ u64 digest_long(const u8* at, u64 length, const u64* secret, int lane, u32 group) {
  const u64 starts[lanes] = {prime32_3, prime64_1, prime64_2, prime64_3, prime64_4, prime32_2, prime64_5, prime32_1};
  const int stripes_of_block = (secret_bytes - 64) / 8;
  const u64 scramble = secret[stripes_of_block + lane];
  const bool aligned = ((u64)at & 7) == 0;
  u64 sum = starts[lane];
  const u8* mine = at + 8 * lane;
  int left = (int)((length - 1) / 64);
  for (; left >= stripes_of_block; left -= stripes_of_block) {
    if (aligned) {
      u64 values[stripes_of_block];  // all loads of a block are under way before the first is used
#pragma unroll
      for (int i = 0; i < stripes_of_block; ++i, mine += 64) values[i] = *(const u64*)mine;
#pragma unroll
      for (int i = 0; i < stripes_of_block; ++i) accumulate(sum, values[i], secret[i + lane], group);
    } else {
#pragma unroll 1
      for (int i = 0; i < stripes_of_block; ++i, mine += 64) accumulate(sum, load64(mine), secret[i + lane], group);
    }
    sum = (sum ^ (sum >> 47) ^ scramble) * prime32_1;
  }
#pragma unroll 1
  for (int i = 0; i < left; ++i, mine += 64) accumulate(sum, load64(mine), secret[i + lane], group);
  const u8* const bytes = (const u8*)secret;
  accumulate(sum, load64(at + length - 64 + 8 * lane), load64(bytes + secret_bytes - 64 - 7 + 8 * lane), group);
  // Pairs of accumulators are folded, and the results summed up.
  sum ^= load64(bytes + 11 + 8 * lane);
  u64 folded = fold(sum, __shfl_xor_sync(group, sum, 1));
  folded += __shfl_xor_sync(group, folded, 2);
  folded += __shfl_xor_sync(group, folded, 4);
  return avalanche(length * prime64_1 + folded);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

// A block a tile: at most 32 leaves of one run, eight threads each.
extern "C" __global__ void tierload_digest(const Tile* tiles) {
  __shared__ u64 secret_words[secret_bytes / 8];
  for (int i = (int)threadIdx.x; i < secret_bytes / 8; i += (int)blockDim.x) {
    secret_words[i] = load64(secret_of_xxh3 + 8 * i);
  }
  __syncthreads();
  const Tile tile = tiles[blockIdx.x];
  const int leaf = (int)threadIdx.x / lanes, lane = (int)threadIdx.x % lanes;
  const u64 begin = leaf * leaf_bytes;
  if (begin >= tile.length) return;  // all eight threads of a leaf alike
  const u64 left = tile.length - begin;
  const u64 length = left < leaf_bytes ? left : leaf_bytes;
  const u8* const at = (const u8*)tile.from + begin;
  const u32 group = 0xFFu << ((int)threadIdx.x % 32 / lanes * lanes);
  u64 digest = 0;
  if (length > 240) {
    digest = digest_long(at, length, secret_words, lane, group);
  } else if (lane == 0) {
    digest = digest_short(at, length, (const u8*)secret_words);
  }
  if (lane == 0) ((u64*)tile.into)[leaf] = digest;
}
