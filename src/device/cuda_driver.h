// NVIDIA's driver interface: the functions that copies need, found in the library at run time.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace loadstone {

// The names and types are those of cuda.h.
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUresult = int;

// Thread-safe, as the driver is.
class CudaDriver {
 public:
  // Throws Error "device.driver".
  explicit CudaDriver(const std::string& library);

  // Throws Error where a call failed: "device.driver", which names the function, what the driver
  // says and the device; "memory.host" and "memory.device" where memory ran out.
  void check(CUresult result, const char* function, std::string_view device) const;

  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuMemHostAlloc)(void** memory, std::size_t bytes, unsigned flags);
  CUresult (*cuMemFreeHost)(void* memory);
  CUresult (*cuStreamCreate)(CUstream* stream, unsigned flags);
  CUresult (*cuStreamDestroy)(CUstream stream);
  CUresult (*cuEventCreate)(CUevent* event, unsigned flags);
  CUresult (*cuEventDestroy)(CUevent event);
  CUresult (*cuEventRecord)(CUevent event, CUstream stream);
  CUresult (*cuEventSynchronize)(CUevent event);
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr to, const void* from, std::size_t bytes,
                                CUstream stream);
  CUresult (*cuMemcpyDtoH)(void* to, CUdeviceptr from, std::size_t bytes);
  CUresult (*cuGetErrorName)(CUresult result, const char** name);
  CUresult (*cuGetErrorString)(CUresult result, const char** text);

 private:
  struct Close {
    void operator()(void* library) const noexcept;
  };

  std::unique_ptr<void, Close> library_;
};

}  // namespace loadstone
