#include "fake_cuda.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int invalid_value = 1;
constexpr int out_of_memory = 2;
constexpr int invalid_device = 101;
constexpr int invalid_context = 201;
constexpr int invalid_handle = 400;
constexpr int illegal_address = 700;
constexpr int device_count = 2;

struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

struct Stream {
  int device = 0;
  std::vector<Copy> pending{};
};

struct Event {
  int device = 0;
  std::uintptr_t stream = 0;
};

struct Range {
  std::size_t bytes = 0;
  int device = 0;
};

struct Failure {
  std::string function;
  int number = 0;
  int result = 0;
};

struct State {
  std::map<int, int> retained{};
  std::map<std::uintptr_t, Stream> streams{};
  std::map<std::uintptr_t, Event> events{};
  std::map<const std::byte*, std::size_t> pinned{};
  std::map<const std::byte*, Range> memory{};
  std::map<std::string, int> calls{};
  std::vector<Failure> failures{};
  std::uintptr_t next = 0x1000;
  std::size_t pinned_now = 0;
  std::size_t pinned_peak = 0;
  int lost = 0;  // what every call returns
  std::string violations{};
  std::string order{};
};

std::mutex mutex;
State state;
std::string answer;                     // of the last function that returns text
thread_local std::vector<int> current;  // devices of contexts

int violate(const std::string& what, int result) {
  state.violations += what + "\n";
  return result;
}

// What the call is to return instead; 0: go on.
int enter(const std::string& function) {
  const int number = state.calls[function]++;
  for (const Failure& each : state.failures) {
    if (each.function == "lost" && function == "cuMemcpyHtoDAsync_v2" && each.number == number) {
      state.lost = each.result;
    }
    if (each.function == function && each.number == number) return each.result;
  }
  return state.lost;
}

template <typename Map>
auto holding(Map& map, const std::byte* address) {
  auto found = map.upper_bound(address);
  return found == map.begin() ? map.end() : std::prev(found);
}

bool is_pinned(const std::byte* begin, std::size_t bytes) {
  const auto found = holding(state.pinned, begin);
  return found != state.pinned.end() && begin + bytes <= found->first + found->second;
}

bool is_memory(const std::byte* begin, std::size_t bytes, int device) {
  const auto found = holding(state.memory, begin);
  return found != state.memory.end() && begin + bytes <= found->first + found->second.bytes &&
         found->second.device == device;
}

void perform(Stream& stream) {
  for (const Copy& copy : stream.pending) std::memcpy(copy.to, copy.from, copy.bytes);
  stream.pending.clear();
}

int in_context(const char* function) {
  return current.empty() ? violate(std::string(function) + ": no current context", invalid_context)
                         : 0;
}

}  // namespace

extern "C" {

void fake_cuda_reset() {
  const std::lock_guard lock(mutex);
  state = {};
}

void fake_cuda_register(void* address, std::size_t bytes, int device) {
  const std::lock_guard lock(mutex);
  state.memory[static_cast<const std::byte*>(address)] = {bytes, device};
}

void fake_cuda_fail(const char* function, int number, int result) {
  const std::lock_guard lock(mutex);
  state.failures.push_back({function, number, result});
}

const char* fake_cuda_violations() {
  const std::lock_guard lock(mutex);
  return (answer = state.violations).c_str();
}

int fake_cuda_live() {
  const std::lock_guard lock(mutex);
  std::size_t count = state.pinned.size() + state.streams.size() + state.events.size();
  for (const auto& [device, times] : state.retained) count += static_cast<std::size_t>(times);
  return static_cast<int>(count);
}

std::size_t fake_cuda_pinned_peak() {
  const std::lock_guard lock(mutex);
  return state.pinned_peak;
}

int fake_cuda_calls(const char* function) {
  const std::lock_guard lock(mutex);
  return state.calls[function];
}

void fake_cuda_note(const char* line) {
  const std::lock_guard lock(mutex);
  state.order += std::string(line) + "\n";
}

const char* fake_cuda_order() {
  const std::lock_guard lock(mutex);
  return (answer = state.order).c_str();
}

int cuInit(unsigned flags) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuInit")) return failed;
  return flags == 0 ? 0 : invalid_value;
}

int cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuDeviceGet")) return failed;
  if (ordinal < 0 || ordinal >= device_count) return invalid_device;
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuDevicePrimaryCtxRetain")) return failed;
  ++state.retained[device];
  *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1);
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuDevicePrimaryCtxRelease_v2")) return failed;
  if (state.retained[device] == 0) return violate("a context is released twice", invalid_context);
  --state.retained[device];
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuCtxPushCurrent_v2")) return failed;
  const int device = static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
  if (state.retained[device] == 0) return violate("a context that is gone", invalid_context);
  current.push_back(device);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  const std::lock_guard lock(mutex);
  if (current.empty()) return violate("nothing to pop", invalid_context);
  *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(current.back()) + 1);
  current.pop_back();
  return enter("cuCtxPopCurrent_v2");
}

int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuMemHostAlloc")) return failed;
  if (const int failed = in_context("cuMemHostAlloc")) return failed;
  if (flags != 1) return violate("memory is pinned for one context only", invalid_value);
  auto* const made = new (std::nothrow) std::byte[bytes];
  if (made == nullptr) return out_of_memory;
  state.pinned[made] = bytes;
  state.pinned_now += bytes;
  state.pinned_peak = std::max(state.pinned_peak, state.pinned_now);
  *memory = made;
  return 0;
}

int cuMemFreeHost(void* memory) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuMemFreeHost")) return failed;
  const auto found = state.pinned.find(static_cast<std::byte*>(memory));
  if (found == state.pinned.end()) return violate("no pinned memory is freed", invalid_value);
  for (const auto& [number, stream] : state.streams) {
    for (const Copy& copy : stream.pending) {
      if (copy.from >= found->first && copy.from < found->first + found->second) {
        return violate("pinned memory is freed under a copy", invalid_value);
      }
    }
  }
  state.pinned_now -= found->second;
  delete[] found->first;
  state.pinned.erase(found);
  return 0;
}

int cuStreamCreate(void** stream, unsigned flags) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuStreamCreate")) return failed;
  if (const int failed = in_context("cuStreamCreate")) return failed;
  if (flags != 1) return violate("the stream waits for the default one", invalid_value);
  state.streams[++state.next] = {current.back()};
  *stream = reinterpret_cast<void*>(state.next);
  return 0;
}

int cuStreamDestroy_v2(void* stream) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuStreamDestroy_v2")) return failed;
  const auto found = state.streams.find(reinterpret_cast<std::uintptr_t>(stream));
  if (found == state.streams.end()) return violate("no stream is destroyed", invalid_handle);
  if (!found->second.pending.empty()) violate("a stream is destroyed under a copy", 0);
  state.streams.erase(found);
  return 0;
}

int cuEventCreate(void** event, unsigned flags) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuEventCreate")) return failed;
  if (const int failed = in_context("cuEventCreate")) return failed;
  if ((flags & 1) == 0) return violate("a thread would spin while it waits", invalid_value);
  state.events[++state.next] = {current.back()};
  *event = reinterpret_cast<void*>(state.next);
  return 0;
}

int cuEventDestroy_v2(void* event) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuEventDestroy_v2")) return failed;
  if (state.events.erase(reinterpret_cast<std::uintptr_t>(event)) == 0) {
    return violate("no event is destroyed", invalid_handle);
  }
  return 0;
}

int cuEventRecord(void* event, void* stream) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuEventRecord")) return failed;
  const auto found = state.events.find(reinterpret_cast<std::uintptr_t>(event));
  const auto recorded = state.streams.find(reinterpret_cast<std::uintptr_t>(stream));
  if (found == state.events.end() || recorded == state.streams.end()) {
    return violate("an event or a stream that is gone", invalid_handle);
  }
  if (found->second.device != recorded->second.device) {
    return violate("an event of another context", invalid_handle);
  }
  found->second.stream = recorded->first;
  return 0;
}

int cuEventSynchronize(void* event) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuEventSynchronize")) return failed;
  const auto found = state.events.find(reinterpret_cast<std::uintptr_t>(event));
  if (found == state.events.end()) return violate("an event that is gone", invalid_handle);
  const auto recorded = state.streams.find(found->second.stream);
  if (recorded == state.streams.end()) return violate("an event of nothing", invalid_handle);
  perform(recorded->second);
  state.order += "wait " + std::to_string(recorded->first) + "\n";
  return 0;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void* stream) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuMemcpyHtoDAsync_v2")) return failed;
  if (const int failed = in_context("cuMemcpyHtoDAsync")) return failed;
  const auto found = state.streams.find(reinterpret_cast<std::uintptr_t>(stream));
  if (found == state.streams.end() || found->second.device != current.back()) {
    return violate("a stream of another context", invalid_handle);
  }
  const Copy copy = {reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(to)),
                     static_cast<const std::byte*>(from), bytes};
  if (bytes == 0) return violate("a copy of nothing", invalid_value);
  if (!is_memory(copy.to, bytes, current.back())) {
    return violate("a copy outside of the device's memory", illegal_address);
  }
  if (!is_pinned(copy.from, bytes)) return violate("a copy from pageable memory", invalid_value);
  found->second.pending.push_back(copy);
  state.order += "copy " + std::to_string(found->first) + "\n";
  return 0;
}

int cuMemcpyDtoH_v2(void* to, unsigned long long from, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  if (const int failed = enter("cuMemcpyDtoH_v2")) return failed;
  if (const int failed = in_context("cuMemcpyDtoH")) return failed;
  const auto* const memory = reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(from));
  if (!is_memory(memory, bytes, current.back())) {
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
      {invalid_handle, "CUDA_ERROR_INVALID_HANDLE"},
  };
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? invalid_value : 0;
}

int cuGetErrorString(int result, const char** text) {
  *text = result == out_of_memory ? "out of memory" : "the fake driver was told to fail";
  return 0;
}

}  // extern "C"
