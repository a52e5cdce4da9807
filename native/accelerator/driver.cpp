#include "accelerator/driver.h"

#include <dlfcn.h>

namespace tierload::cuda {
namespace {

struct Opened {
  Driver driver{};
  std::string refusal;
};

template <typename Call>
void find(void* library, const char* name, Call& call, std::string& missing) {
  call = reinterpret_cast<Call>(::dlsym(library, name));
  if (call == nullptr && missing.empty()) missing = name;
}

std::string load(Driver& driver) {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "no CUDA driver: libcuda.so.1 cannot be opened";
  std::string missing;
  find(library, "cuInit", driver.init, missing);
  find(library, "cuDeviceGetCount", driver.device_count, missing);
  find(library, "cuDeviceGet", driver.device_get, missing);
  find(library, "cuDeviceGetName", driver.device_name, missing);
  find(library, "cuDevicePrimaryCtxRetain", driver.primary_retain, missing);
  find(library, "cuCtxPushCurrent_v2", driver.push, missing);
  find(library, "cuCtxPopCurrent_v2", driver.pop, missing);
  find(library, "cuMemHostAlloc", driver.host_alloc, missing);
  find(library, "cuMemFreeHost", driver.host_free, missing);
  find(library, "cuMemAlloc_v2", driver.alloc, missing);
  find(library, "cuMemFree_v2", driver.free, missing);
  find(library, "cuMemcpyDtoHAsync_v2", driver.to_host, missing);
  find(library, "cuMemcpyHtoDAsync_v2", driver.to_device, missing);
  find(library, "cuMemcpyAsync", driver.copy, missing);
  find(library, "cuStreamCreate", driver.stream_create, missing);
  find(library, "cuStreamDestroy_v2", driver.stream_destroy, missing);
  find(library, "cuStreamSynchronize", driver.stream_synchronize, missing);
  find(library, "cuStreamWaitEvent", driver.stream_wait, missing);
  find(library, "cuEventCreate", driver.event_create, missing);
  find(library, "cuEventDestroy_v2", driver.event_destroy, missing);
  find(library, "cuEventRecord", driver.event_record, missing);
  find(library, "cuEventQuery", driver.event_query, missing);
  find(library, "cuEventSynchronize", driver.event_synchronize, missing);
  find(library, "cuModuleLoadData", driver.module_load, missing);
  find(library, "cuModuleGetFunction", driver.module_function, missing);
  find(library, "cuLaunchKernel", driver.launch, missing);
  find(library, "cuGetErrorName", driver.error_name, missing);
  find(library, "cuGetErrorString", driver.error_string, missing);
  if (!missing.empty()) return "the CUDA driver is too old: it lacks " + missing;
  try {
    driver.check(driver.init(0), "cuInit");
  } catch (const AcceleratorError& error) {
    return error.what();
  }
  return "";
}

const Opened& opened() {
  static const Opened& once = *[] {
    auto* const made = new Opened;  // as long as the process: threads may use it at its end
    made->refusal = load(made->driver);
    return made;
  }();
  return once;
}

}  // namespace

const Driver* Driver::open() { return opened().refusal.empty() ? &opened().driver : nullptr; }

const std::string& Driver::refusal() { return opened().refusal; }

void Driver::check(Result result, const char* call) const {
  if (result == 0) return;
  const char* name = nullptr;
  const char* words = nullptr;
  error_name(result, &name);
  error_string(result, &words);
  throw AcceleratorError(std::string(call) + ": " + (words ? words : "unknown error") + " (" +
                         (name ? name : std::to_string(result).c_str()) + ")");
}

}  // namespace tierload::cuda
