// Defines the driver functions that are the same in all versions.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "fake_state.h"

using namespace fake_cuda;

namespace {

void perform(Stream& stream) {
  for (const Copy& copy : stream.pending) std::memcpy(copy.to, copy.from, copy.bytes);
  stream.pending.clear();
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuInit")) return failed;
  return flags == 0 ? 0 : invalid_value;
}

int cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuDeviceGet")) return failed;
  if (ordinal < 0 || ordinal >= device_count) return invalid_device;
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuDevicePrimaryCtxRetain")) return failed;
  ++state().retained[device];
  *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1);
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuDevicePrimaryCtxRelease_v2")) return failed;
  if (state().retained[device] == 0) return violate("a context is released twice", invalid_context);
  --state().retained[device];
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuCtxPushCurrent_v2")) return failed;
  const int device = static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
  if (state().retained[device] == 0) return violate("a context that is gone", invalid_context);
  current().push_back(device);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  const std::lock_guard lock(mutex());
  if (current().empty()) return violate("nothing to pop", invalid_context);
  *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(current().back()) + 1);
  current().pop_back();
  return enter("cuCtxPopCurrent_v2");
}

int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuMemHostAlloc")) return failed;
  if (const int failed = in_context("cuMemHostAlloc")) return failed;
  if (flags != 1) return violate("memory is pinned for one context only", invalid_value);
  auto* const made = new (std::nothrow) std::byte[bytes];
  if (made == nullptr) return out_of_memory;
  state().pinned[made] = bytes;
  state().pinned_now += bytes;
  state().pinned_peak = std::max(state().pinned_peak, state().pinned_now);
  *memory = made;
  return 0;
}

int cuMemFreeHost(void* memory) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuMemFreeHost")) return failed;
  const auto found = state().pinned.find(static_cast<std::byte*>(memory));
  if (found == state().pinned.end()) return violate("no pinned memory is freed", invalid_value);
  for (const auto& [number, stream] : state().streams) {
    for (const Copy& copy : stream.pending) {
      if (copy.from >= found->first && copy.from < found->first + found->second) {
        return violate("pinned memory is freed under a copy", invalid_value);
      }
    }
  }
  state().pinned_now -= found->second;
  delete[] found->first;
  state().pinned.erase(found);
  return 0;
}

int cuMemGetAddressRange_v2(unsigned long long* begin, std::size_t* bytes,
                            unsigned long long memory) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuMemGetAddressRange_v2")) return failed;
  if (const int failed = in_context("cuMemGetAddressRange")) return failed;
  const auto* const address =
      reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(memory));
  const auto found = state().memory.upper_bound(address);
  if (found == state().memory.begin()) return violate("a range of no memory", invalid_value);
  const auto& [first, range] = *std::prev(found);
  if (!is_memory(address, 1, range.device)) return violate("a range of no memory", invalid_value);
  *begin = reinterpret_cast<std::uintptr_t>(first);
  *bytes = range.bytes;
  return 0;
}

int cuStreamCreate(void** stream, unsigned flags) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuStreamCreate")) return failed;
  if (const int failed = in_context("cuStreamCreate")) return failed;
  if (flags != 1) return violate("the stream waits for the default one", invalid_value);
  state().streams[++state().next] = {current().back()};
  *stream = reinterpret_cast<void*>(state().next);
  return 0;
}

int cuStreamDestroy_v2(void* stream) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuStreamDestroy_v2")) return failed;
  const auto found = state().streams.find(reinterpret_cast<std::uintptr_t>(stream));
  if (found == state().streams.end()) return violate("no stream is destroyed", invalid_handle);
  if (!found->second.pending.empty()) violate("a stream is destroyed under a copy", 0);
  state().streams.erase(found);
  return 0;
}

int cuEventCreate(void** event, unsigned flags) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuEventCreate")) return failed;
  if (const int failed = in_context("cuEventCreate")) return failed;
  if ((flags & 1) == 0) return violate("a thread would spin while it waits", invalid_value);
  state().events[++state().next] = {current().back()};
  *event = reinterpret_cast<void*>(state().next);
  return 0;
}

int cuEventDestroy_v2(void* event) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuEventDestroy_v2")) return failed;
  if (state().events.erase(reinterpret_cast<std::uintptr_t>(event)) == 0) {
    return violate("no event is destroyed", invalid_handle);
  }
  return 0;
}

int cuEventRecord(void* event, void* stream) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuEventRecord")) return failed;
  const auto found = state().events.find(reinterpret_cast<std::uintptr_t>(event));
  const auto recorded = state().streams.find(reinterpret_cast<std::uintptr_t>(stream));
  if (found == state().events.end() || recorded == state().streams.end()) {
    return violate("an event or a stream that is gone", invalid_handle);
  }
  if (found->second.device != recorded->second.device) {
    return violate("an event of another context", invalid_handle);
  }
  found->second.stream = recorded->first;
  return 0;
}

int cuEventSynchronize(void* event) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuEventSynchronize")) return failed;
  const auto found = state().events.find(reinterpret_cast<std::uintptr_t>(event));
  if (found == state().events.end()) return violate("an event that is gone", invalid_handle);
  const auto recorded = state().streams.find(found->second.stream);
  if (recorded == state().streams.end()) return violate("an event of nothing", invalid_handle);
  perform(recorded->second);
  state().order += "wait " + std::to_string(recorded->first) + "\n";
  return 0;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void* stream) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuMemcpyHtoDAsync_v2")) return failed;
  if (const int failed = in_context("cuMemcpyHtoDAsync")) return failed;
  int result = 0;
  Stream* const found = stream_for_copies(stream, result);
  if (found == nullptr) return result;
  auto* const memory = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(to));
  result = add_copy(*found, {memory, static_cast<const std::byte*>(from), bytes});
  if (result != 0) return result;
  state().order += "copy " + std::to_string(reinterpret_cast<std::uintptr_t>(stream)) + "\n";
  return 0;
}

int cuMemcpyDtoH_v2(void* to, unsigned long long from, std::size_t bytes) {
  const std::lock_guard lock(mutex());
  if (const int failed = enter("cuMemcpyDtoH_v2")) return failed;
  if (const int failed = in_context("cuMemcpyDtoH")) return failed;
  const auto* const memory = reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(from));
  if (!is_memory(memory, bytes, current().back())) {
    return violate("a read outside of the device's memory", illegal_address);
  }
  std::memcpy(to, memory, bytes);
  return 0;
}

int cuGetErrorName(int result, const char** name) {
  static const std::map<int, const char*> names = {
      {invalid_value, "CUDA_ERROR_INVALID_VALUE"},
      {out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {invalid_device, "CUDA_ERROR_INVALID_DEVICE"},
      {invalid_context, "CUDA_ERROR_INVALID_CONTEXT"},
      {illegal_address, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {not_supported, "CUDA_ERROR_NOT_SUPPORTED"},
      {invalid_handle, "CUDA_ERROR_INVALID_HANDLE"},
  };
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? invalid_value : 0;
}

int cuGetErrorString(int result, const char** text) {
  *text = result == out_of_memory ? "out of memory" : "the fake driver fails on request";
  return 0;
}

}  // extern "C"
