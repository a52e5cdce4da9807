// The part of CUDA's driver that is used, by the names and numbers of its documentation
// (https://docs.nvidia.com/cuda/cuda-driver-api/). It is opened at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tierload/error.h"

namespace tierload::cuda {

using Result = int;  // 0: success
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using Module = void*;
using Function = void*;
using Pointer = uint64_t;

constexpr Result invalid_value = 1;
constexpr Result not_ready = 600;
constexpr unsigned host_portable = 1;         // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned stream_non_blocking = 1;   // CU_STREAM_NON_BLOCKING
constexpr unsigned event_blocking_sync = 1;   // CU_EVENT_BLOCKING_SYNC
constexpr unsigned event_disable_timing = 2;  // CU_EVENT_DISABLE_TIMING

struct Driver {
  // Nullptr where there is none; refusal() says why.
  static const Driver* open();
  static const std::string& refusal();

  // Throws AcceleratorError with the call's name and the driver's words.
  void check(Result result, const char* call) const;

  Result (*init)(unsigned flags);
  Result (*device_count)(int* count);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_name)(char* name, int length, Device device);
  Result (*primary_retain)(Context* context, Device device);
  Result (*push)(Context context);
  Result (*pop)(Context* context);
  Result (*host_alloc)(void** at, size_t bytes, unsigned flags);
  Result (*host_free)(void* at);
  Result (*alloc)(Pointer* at, size_t bytes);
  Result (*free)(Pointer at);
  Result (*to_host)(void* into, Pointer from, size_t bytes, Stream stream);
  Result (*to_device)(Pointer into, const void* from, size_t bytes, Stream stream);
  Result (*copy)(Pointer into, Pointer from, size_t bytes, Stream stream);  // between any memory
  Result (*stream_create)(Stream* stream, unsigned flags);
  Result (*stream_destroy)(Stream stream);
  Result (*stream_synchronize)(Stream stream);
  Result (*stream_wait)(Stream stream, Event event, unsigned flags);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_destroy)(Event event);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_query)(Event event);
  Result (*event_synchronize)(Event event);
  Result (*module_load)(Module* module, const void* image);
  Result (*module_function)(Function* function, Module module, const char* name);
  Result (*launch)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters,
                   void** extra);
  Result (*error_name)(Result result, const char** text);
  Result (*error_string)(Result result, const char** text);
};

}  // namespace tierload::cuda
