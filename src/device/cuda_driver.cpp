#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "loadstone/error.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse(const std::string& library, std::string message) {
  const char* const reason = ::dlerror();
  throw Error("device.driver", std::move(message),
              {.path = library, .found = reason != nullptr ? reason : ""});
}

// Looks up a function; returns false if it is missing.
template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));  // NOLINT
  return function != nullptr;
}

template <typename Function>
void require(void* library, const std::string& path, const char* name, Function& function) {
  if (!find(library, name, function)) {
    refuse(path, fmt::format("the CUDA driver has no function {}", name));
  }
}

}  // namespace

void CudaDriver::Close::operator()(void* library) const noexcept { ::dlclose(library); }

CudaDriver::CudaDriver(const std::string& library)
    : library_(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) refuse(library, "the CUDA driver cannot be loaded");
#define LOADSTONE_REQUIRE(function) require(library_.get(), library, #function, function);
  LOADSTONE_CUDA_FUNCTIONS(LOADSTONE_REQUIRE)
#undef LOADSTONE_REQUIRE
  static_cast<void>(find(library_.get(), "cuMemcpyBatchAsync_v2", cuMemcpyBatchAsync_v2));
  static_cast<void>(find(library_.get(), "cuMemcpyBatchAsync", cuMemcpyBatchAsync));
  check(cuInit(0), "cuInit", "");
}

CUresult CudaDriver::copy_batch(std::span<CUdeviceptr> to, std::span<CUdeviceptr> from,
                                std::span<std::size_t> bytes, std::size_t& failed,
                                CUstream stream) const {
  CUmemcpyAttributes attributes = {.srcAccessOrder = cuda::source_in_stream_order};
  std::size_t first = 0;
  if (cuMemcpyBatchAsync_v2 != nullptr) {
    return cuMemcpyBatchAsync_v2(to.data(), from.data(), bytes.data(), to.size(), &attributes,
                                 &first, 1, stream);
  }
  std::size_t found = SIZE_MAX;  // remains if the driver names no single copy
  const CUresult result = cuMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(),
                                             &attributes, &first, 1, &found, stream);
  if (result != cuda::success && found < to.size()) failed = found;
  return result;
}

void CudaDriver::check(CUresult result, const char* function, std::string_view device) const {
  if (result == cuda::success) return;
  const char* name = nullptr;
  const char* text = nullptr;
  static_cast<void>(cuGetErrorName(result, &name));
  static_cast<void>(cuGetErrorString(result, &text));
  const bool is_full = result == cuda::out_of_memory;
  const bool is_host = is_full && std::string_view(function) == "cuMemHostAlloc";
  throw Error(is_host   ? "memory.host"
              : is_full ? "memory.device"
                        : "device.driver",
              fmt::format("the call {} failed", function),
              {.field = std::string(device),
               .found = fmt::format("{} ({}): {}", name != nullptr ? name : "an unknown error",
                                    result, text != nullptr ? text : "")});
}

}  // namespace loadstone
