// Work for kernels. `make kernels` compiles them for the driver, which translates the result for the device at hand;
// native/tests/kernels_test.cpp runs them on the processor.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// What one block does.
struct Tile {
  u64 from;
  u64 into;  // of a digest: where its first leaf's digest goes
  u64 length;
};
