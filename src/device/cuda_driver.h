// Finds the functions of NVIDIA's driver that copies need, in its library at run time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;

namespace loadstone {

// The names, types and values are those of cuda.h. tests/device/abi compares all of them.
using CUcontext = ::CUctx_st*;
using CUstream = ::CUstream_st*;
using CUevent = ::CUevent_st*;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUresult = int;

struct CUmemLocation {
  int type = 0;  // no hint: pinned memory and device memory have only one location
  int id = 0;
};

// Attributes of the copies of a batch.
struct CUmemcpyAttributes {
  int srcAccessOrder = 0;
  CUmemLocation srcLocHint{};
  CUmemLocation dstLocHint{};
  unsigned flags = 0;
};

namespace cuda {

inline constexpr CUresult success = 0;
inline constexpr CUresult out_of_memory = 2;
inline constexpr CUresult not_supported = 801;
inline constexpr unsigned host_memory_portable = 1;  // memory is pinned for all contexts
inline constexpr unsigned stream_non_blocking = 1;   // does not wait for the default stream
// A waiting thread sleeps, because readers need the CPU. Events record no time.
inline constexpr unsigned event_flags = 1 | 2;
inline constexpr int source_in_stream_order = 1;

}  // namespace cuda

// The required functions, by their exported names. cuda.h instead has macros that map unversioned
// names to the newest version.
// clang-format off: one per line
#define LOADSTONE_CUDA_FUNCTIONS(each)                                                             \
  each(cuInit) each(cuDeviceGet) each(cuDevicePrimaryCtxRetain) each(cuDevicePrimaryCtxRelease_v2) \
      each(cuCtxPushCurrent_v2) each(cuCtxPopCurrent_v2) each(cuMemHostAlloc) each(cuMemFreeHost)  \
          each(cuMemGetAddressRange_v2) each(cuStreamCreate) each(cuStreamDestroy_v2)              \
              each(cuEventCreate) each(cuEventDestroy_v2) each(cuEventRecord)                      \
                  each(cuEventSynchronize) each(cuMemcpyHtoDAsync_v2) each(cuMemcpyDtoH_v2)        \
                      each(cuGetErrorName) each(cuGetErrorString)
// clang-format on

// Thread-safe, because the driver is.
class CudaDriver {
 public:
  // Loads the library. Throws Error "device.driver".
  explicit CudaDriver(const std::string& library);

  // Throws an Error if `result` is a failure: "memory.host" or "memory.device" if memory ran out,
  // otherwise "device.driver" with the function, the driver's message and the device.
  void check(CUresult result, const char* function, std::string_view device) const;

  // Returns true if one call can start many copies.
  [[nodiscard]] bool has_batches() const noexcept {
    return cuMemcpyBatchAsync_v2 != nullptr || cuMemcpyBatchAsync != nullptr;
  }
  // Starts copies from pinned memory, in any order. `failed`: see Device::copy_all().
  [[nodiscard]] CUresult copy_batch(std::span<CUdeviceptr> to, std::span<CUdeviceptr> from,
                                    std::span<std::size_t> bytes, std::size_t& failed,
                                    CUstream stream) const;

  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease_v2)(CUdevice device);
  CUresult (*cuCtxPushCurrent_v2)(CUcontext context);
  CUresult (*cuCtxPopCurrent_v2)(CUcontext* context);
  CUresult (*cuMemHostAlloc)(void** memory, std::size_t bytes, unsigned flags);
  CUresult (*cuMemFreeHost)(void* memory);
  CUresult (*cuMemGetAddressRange_v2)(CUdeviceptr* begin, std::size_t* bytes, CUdeviceptr memory);
  CUresult (*cuStreamCreate)(CUstream* stream, unsigned flags);
  CUresult (*cuStreamDestroy_v2)(CUstream stream);
  CUresult (*cuEventCreate)(CUevent* event, unsigned flags);
  CUresult (*cuEventDestroy_v2)(CUevent event);
  CUresult (*cuEventRecord)(CUevent event, CUstream stream);
  CUresult (*cuEventSynchronize)(CUevent event);
  CUresult (*cuMemcpyHtoDAsync_v2)(CUdeviceptr to, const void* from, std::size_t bytes,
                                   CUstream stream);
  CUresult (*cuMemcpyDtoH_v2)(void* to, CUdeviceptr from, std::size_t bytes);
  CUresult (*cuGetErrorName)(CUresult result, const char** name);
  CUresult (*cuGetErrorString)(CUresult result, const char** text);
  // Null if the driver lacks the function. _v2 exists from CUDA 13 on; the older version exists
  // from 12.8 on, and only this one reports which copy failed.
  CUresult (*cuMemcpyBatchAsync_v2)(CUdeviceptr* to, CUdeviceptr* from, std::size_t* bytes,
                                    std::size_t count, CUmemcpyAttributes* attributes,
                                    std::size_t* first_of_attributes, std::size_t attribute_count,
                                    CUstream stream) = nullptr;
  CUresult (*cuMemcpyBatchAsync)(CUdeviceptr* to, CUdeviceptr* from, std::size_t* bytes,
                                 std::size_t count, CUmemcpyAttributes* attributes,
                                 std::size_t* first_of_attributes, std::size_t attribute_count,
                                 std::size_t* failed, CUstream stream) = nullptr;

 private:
  struct Close {
    void operator()(void* library) const noexcept;
  };

  std::unique_ptr<void, Close> library_;
};

}  // namespace loadstone
