#include <array>
#include <charconv>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/only_errors.h"
#include "device/cuda_driver.h"
#include "loadstone/device.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// As cuda.h has them.
constexpr unsigned host_memory_portable = 1;  // pinned for all contexts
constexpr unsigned stream_non_blocking = 1;   // does not wait for the default stream
// The thread sleeps while it waits: readers want the processor. No time is measured.
constexpr unsigned event_flags = 1 | 2;

int ordinal_of(std::string_view device) {
  constexpr std::string_view kind = "cuda";
  int ordinal = 0;
  std::string_view rest = device;
  const bool is_cuda = rest.starts_with(kind);
  rest.remove_prefix(is_cuda ? kind.size() : 0);
  if (is_cuda && rest.empty()) return ordinal;
  if (is_cuda && rest.starts_with(':')) {
    const auto [end, problem] =
        std::from_chars(rest.data() + 1, rest.data() + rest.size(), ordinal);
    if (problem == std::errc() && end == rest.data() + rest.size()) return ordinal;
  }
  throw Error("device.driver", "CUDA's driver copies to its own devices",
              {.found = std::string(device), .expected = "cuda:0, cuda:1 ..."});
}

struct Lane {
  CUstream stream = nullptr;
  CUevent event = nullptr;
  bool is_busy = false;  // has copies that nobody waited for
};

// One device of the driver: its primary context, and streams in it.
class Context {
 public:
  Context(const CudaDriver& driver, std::string_view device) : driver_(driver), name_(device) {
    const int ordinal = ordinal_of(device);
    driver_.check(driver_.cuDeviceGet(&device_, ordinal), "cuDeviceGet", name_);
    driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain",
                  name_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  // No copy is under way.
  ~Context() {
    if (driver_.cuCtxPushCurrent(context_) == 0) {
      for (const auto& [number, lane] : lanes_) {
        static_cast<void>(driver_.cuEventDestroy(lane.event));
        static_cast<void>(driver_.cuStreamDestroy(lane.stream));
      }
      CUcontext popped = nullptr;
      static_cast<void>(driver_.cuCtxPopCurrent(&popped));
    }
    static_cast<void>(driver_.cuDevicePrimaryCtxRelease(device_));
  }

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  // Calls the driver with this context as the thread's current one.
  template <typename Call>
  void call(const char* function, const Call& call) {
    driver_.check(driver_.cuCtxPushCurrent(context_), "cuCtxPushCurrent", name_);
    const CUresult result = call();
    CUcontext popped = nullptr;
    const CUresult pop = driver_.cuCtxPopCurrent(&popped);
    driver_.check(result, function, name_);
    driver_.check(pop, "cuCtxPopCurrent", name_);
  }

  // With its stream and event. The reference stays good.
  Lane& lane(unsigned number) {
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = lanes_.try_emplace(number);
    if (!is_new) return known->second;
    Lane made;
    try {
      call("cuStreamCreate",
           [&] { return driver_.cuStreamCreate(&made.stream, stream_non_blocking); });
      call("cuEventCreate", [&] { return driver_.cuEventCreate(&made.event, event_flags); });
    } catch (...) {
      if (made.stream != nullptr) static_cast<void>(driver_.cuStreamDestroy(made.stream));
      lanes_.erase(known);
      throw;
    }
    return known->second = made;
  }
  // Null: nothing was ever copied in it.
  Lane* known_lane(unsigned number) {
    const std::lock_guard lock(mutex_);
    const auto known = lanes_.find(number);
    return known == lanes_.end() ? nullptr : &known->second;
  }

 private:
  const CudaDriver& driver_;
  const std::string name_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::mutex mutex_;
  std::map<unsigned, Lane> lanes_;  // guarded by mutex_; what is in a lane is its thread's
};

class Cuda final : public Device {
 public:
  explicit Cuda(const std::string& library) : driver_(library) {
    CUdevice first = 0;
    driver_.check(driver_.cuDeviceGet(&first, 0), "cuDeviceGet", "cuda:0");
  }

  std::byte* allocate(std::string_view device, std::uint64_t bytes) override {
    void* memory = nullptr;
    context(device).call("cuMemHostAlloc", [&] {
      return driver_.cuMemHostAlloc(&memory, bytes, host_memory_portable);
    });
    return static_cast<std::byte*>(memory);
  }

  void free(std::byte* memory) noexcept override {
    for (Context* const context : contexts()) {
      try {
        context->call("cuMemFreeHost", [&] { return driver_.cuMemFreeHost(memory); });
        return;
      } catch (const std::exception&) {
        // A device that is lost: the memory is every context's.
      }
    }
  }

  void copy(unsigned number, std::string_view device, std::byte* to,
            std::span<const std::byte> from) override {
    Context& context = this->context(device);
    Lane& lane = context.lane(number);
    lane.is_busy = true;
    context.call("cuMemcpyHtoDAsync", [&] {
      return driver_.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from.data(),  // NOLINT
                                       from.size(), lane.stream);
    });
  }

  void wait(unsigned number) override {
    for (Context* const context : contexts()) {
      Lane* const lane = context->known_lane(number);
      if (lane == nullptr || !lane->is_busy) continue;
      context->call("cuEventRecord",
                    [&] { return driver_.cuEventRecord(lane->event, lane->stream); });
      context->call("cuEventSynchronize", [&] { return driver_.cuEventSynchronize(lane->event); });
      lane->is_busy = false;
    }
  }

  void read(std::string_view device, const std::byte* from, std::span<std::byte> to) override {
    context(device).call("cuMemcpyDtoH", [&] {
      return driver_.cuMemcpyDtoH(to.data(), reinterpret_cast<CUdeviceptr>(from),  // NOLINT
                                  to.size());
    });
  }

 private:
  Context& context(std::string_view device) {
    const std::lock_guard lock(mutex_);
    auto known = contexts_.find(device);
    if (known == contexts_.end()) {
      auto made = std::make_unique<Context>(driver_, device);
      known = contexts_.emplace(std::string(device), std::move(made)).first;
    }
    return *known->second;
  }
  [[nodiscard]] std::vector<Context*> contexts() {
    const std::lock_guard lock(mutex_);
    std::vector<Context*> all;
    for (const auto& [name, context] : contexts_) all.push_back(context.get());
    return all;
  }

  CudaDriver driver_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Context>, std::less<>> contexts_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Device> open_cuda(const std::string& library) {
  return only_errors([&]() -> std::unique_ptr<Device> { return std::make_unique<Cuda>(library); });
}

}  // namespace loadstone
