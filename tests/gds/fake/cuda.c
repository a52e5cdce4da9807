// The calls of libcuda.so.1 that a probe makes, over memory of the host: for machines without a GPU.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = 40 + ordinal, ordinal == 0 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)0x10000000040, device == 40 ? 0 : 101; }
int cuCtxSetCurrent(void* context) { return context == (void*)0x10000000040 ? 0 : 201; }
int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  if (bytes > 1ull << 32) return 2;
  *pointer = (uint64_t)aligned_alloc(4096, bytes);
  return 0;
}
int cuMemFree_v2(uint64_t pointer) { return free((void*)pointer), 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) { return memcpy((void*)to, from, bytes), 0; }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { return memcpy(to, (void*)from, bytes), 0; }
int cuCtxSynchronize(void) { return 0; }
int cuGetErrorString(int code, const char** text) { return *text = code == 2 ? "out of memory" : "invalid", 0; }
