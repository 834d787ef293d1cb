#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr CUresult success = 0;
constexpr CUresult out_of_memory = 2;

[[noreturn]] void refuse(const std::string& library, std::string message) {
  const char* const reason = ::dlerror();
  throw Error("device.driver", std::move(message),
              {.path = library, .found = reason != nullptr ? reason : ""});
}

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  void* const found = ::dlsym(library, name);
  if (found == nullptr) refuse(path, fmt::format("the driver has no function {}", name));
  function = reinterpret_cast<Function>(found);  // NOLINT
}

}  // namespace

void CudaDriver::Close::operator()(void* library) const noexcept { ::dlclose(library); }

CudaDriver::CudaDriver(const std::string& library)
    : library_(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) refuse(library, "CUDA's driver cannot be loaded");
  const auto get = [&](const char* name, auto& function) {
    find(library_.get(), library, name, function);
  };
  // As in cuda.h, which gives later versions of a function the name of the first.
  get("cuInit", cuInit);
  get("cuDeviceGet", cuDeviceGet);
  get("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain);
  get("cuDevicePrimaryCtxRelease_v2", cuDevicePrimaryCtxRelease);
  get("cuCtxPushCurrent_v2", cuCtxPushCurrent);
  get("cuCtxPopCurrent_v2", cuCtxPopCurrent);
  get("cuMemHostAlloc", cuMemHostAlloc);
  get("cuMemFreeHost", cuMemFreeHost);
  get("cuStreamCreate", cuStreamCreate);
  get("cuStreamDestroy_v2", cuStreamDestroy);
  get("cuEventCreate", cuEventCreate);
  get("cuEventDestroy_v2", cuEventDestroy);
  get("cuEventRecord", cuEventRecord);
  get("cuEventSynchronize", cuEventSynchronize);
  get("cuMemcpyHtoDAsync_v2", cuMemcpyHtoDAsync);
  get("cuMemcpyDtoH_v2", cuMemcpyDtoH);
  get("cuGetErrorName", cuGetErrorName);
  get("cuGetErrorString", cuGetErrorString);
  check(cuInit(0), "cuInit", "");
}

void CudaDriver::check(CUresult result, const char* function, std::string_view device) const {
  if (result == success) return;
  const char* name = nullptr;
  const char* text = nullptr;
  static_cast<void>(cuGetErrorName(result, &name));
  static_cast<void>(cuGetErrorString(result, &text));
  const bool is_full = result == out_of_memory;
  const bool is_host = is_full && std::string_view(function) == "cuMemHostAlloc";
  throw Error(is_host   ? "memory.host"
              : is_full ? "memory.device"
                        : "device.driver",
              fmt::format("{} failed", function),
              {.field = std::string(device),
               .found = fmt::format("{} ({}): {}", name != nullptr ? name : "an unknown error",
                                    result, text != nullptr ? text : "")});
}

}  // namespace loadstone
