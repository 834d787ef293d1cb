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
  throw Error("device.driver", "the CUDA driver can copy only to CUDA devices",
              {.found = std::string(device), .expected = "cuda:0, cuda:1 ..."});
}

struct Lane {
  CUstream stream = nullptr;
  CUevent event = nullptr;
  bool is_busy = false;  // has copies that wait() has not waited for
};

// A CUDA device: its primary context, and one stream per lane.
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
  // Precondition: no copy is in flight.
  ~Context() {
    if (driver_.cuCtxPushCurrent_v2(context_) == cuda::success) {
      for (const auto& [number, lane] : lanes_) {
        static_cast<void>(driver_.cuEventDestroy_v2(lane.event));
        static_cast<void>(driver_.cuStreamDestroy_v2(lane.stream));
      }
      CUcontext popped = nullptr;
      static_cast<void>(driver_.cuCtxPopCurrent_v2(&popped));
    }
    static_cast<void>(driver_.cuDevicePrimaryCtxRelease_v2(device_));
  }

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  // Makes this context current on the calling thread, and calls the driver.
  template <typename Call>
  void call(const char* function, const Call& call) {
    driver_.check(driver_.cuCtxPushCurrent_v2(context_), "cuCtxPushCurrent", name_);
    const CUresult result = call();
    CUcontext popped = nullptr;
    const CUresult pop = driver_.cuCtxPopCurrent_v2(&popped);
    driver_.check(result, function, name_);
    driver_.check(pop, "cuCtxPopCurrent", name_);
  }

  // Creates the lane's stream and event if necessary. The reference stays valid.
  Lane& lane(unsigned number) {
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = lanes_.try_emplace(number);
    if (!is_new) return known->second;
    Lane made;
    try {
      call("cuStreamCreate",
           [&] { return driver_.cuStreamCreate(&made.stream, cuda::stream_non_blocking); });
      call("cuEventCreate", [&] { return driver_.cuEventCreate(&made.event, cuda::event_flags); });
    } catch (...) {
      if (made.stream != nullptr) static_cast<void>(driver_.cuStreamDestroy_v2(made.stream));
      lanes_.erase(known);
      throw;
    }
    return known->second = made;
  }
  // Returns null if nothing was copied in this lane.
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
  std::map<unsigned, Lane> lanes_;  // guarded by mutex_, except members, which one thread uses
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
      return driver_.cuMemHostAlloc(&memory, bytes, cuda::host_memory_portable);
    });
    return static_cast<std::byte*>(memory);
  }

  void free(std::byte* memory) noexcept override {
    for (Context* const context : contexts()) {
      try {
        context->call("cuMemFreeHost", [&] { return driver_.cuMemFreeHost(memory); });
        return;
      } catch (const std::exception&) {
        // This device may be lost. Any context can free the memory, so the next one tries.
      }
    }
  }

  void copy(unsigned number, std::string_view device, std::byte* to,
            std::span<const std::byte> from) override {
    Context& context = this->context(device);
    Lane& lane = context.lane(number);
    lane.is_busy = true;
    context.call("cuMemcpyHtoDAsync", [&] {
      return driver_.cuMemcpyHtoDAsync_v2(address_of(to), from.data(), from.size(), lane.stream);
    });
  }

  void copy_all(unsigned number, std::string_view device, std::span<const DeviceCopy> copies,
                std::size_t& failed) override {
    const Joined joined = join(context(device), copies);
    std::size_t at = joined.copies.size();
    try {
      const bool is_one_call = at > 1 && driver_.has_batches();
      if (!is_one_call || !copy_batch(number, device, joined.copies, at)) {
        Device::copy_all(number, device, joined.copies, at);
      }
    } catch (const Error&) {
      if (at < joined.copies.size()) failed = joined.first[at];
      throw;
    }
  }

  // Waits for all devices even if one fails, because the caller frees the sources afterwards.
  void wait(unsigned number) override {
    std::exception_ptr failure;
    for (Context* const context : contexts()) {
      Lane* const lane = context->known_lane(number);
      if (lane == nullptr || !lane->is_busy) continue;
      try {
        wait_for(*context, *lane);
      } catch (const Error&) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

  void read(std::string_view device, const std::byte* from, std::span<std::byte> to) override {
    context(device).call("cuMemcpyDtoH", [&] {
      return driver_.cuMemcpyDtoH_v2(to.data(), address_of(from), to.size());
    });
  }

 private:
  void wait_for(Context& context, Lane& lane) const {
    context.call("cuEventRecord", [&] { return driver_.cuEventRecord(lane.event, lane.stream); });
    context.call("cuEventSynchronize", [&] { return driver_.cuEventSynchronize(lane.event); });
    lane.is_busy = false;
  }

  static CUdeviceptr address_of(const std::byte* memory) {
    return reinterpret_cast<CUdeviceptr>(memory);  // NOLINT
  }

  struct Joined {
    std::vector<DeviceCopy> copies;
    std::vector<std::size_t> first;  // for each joined copy, the index of its first copy
  };

  // Joins copies that are adjacent in both source and target. Does not join across the end of a
  // device allocation, because the driver rejects such copies.
  Joined join(Context& context, std::span<const DeviceCopy> copies) {
    Joined joined;
    CUdeviceptr allocation_end = 0;  // end of the last copy's allocation; 0 if not yet queried
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const auto& [to, from] = copies[i];
      if (i > 0) {
        DeviceCopy& last = joined.copies.back();
        if (last.to + last.from.size() == to &&
            last.from.data() + last.from.size() == from.data()) {
          if (allocation_end == 0) allocation_end = end_of_allocation(context, last.to);
          if (address_of(to) + from.size() <= allocation_end) {
            last.from = {last.from.data(), last.from.size() + from.size()};
            continue;
          }
        }
      }
      joined.copies.push_back(copies[i]);
      joined.first.push_back(i);
      allocation_end = 0;
    }
    return joined;
  }

  // Returns 0 if the driver does not report the end.
  CUdeviceptr end_of_allocation(Context& context, const std::byte* memory) {
    CUdeviceptr begin = 0;
    std::size_t bytes = 0;
    context.call("cuMemGetAddressRange", [&] {
      const CUresult result = driver_.cuMemGetAddressRange_v2(&begin, &bytes, address_of(memory));
      if (result != cuda::success) begin = bytes = 0;
      return cuda::success;
    });
    return begin + bytes;
  }

  // Returns false if the driver exports the function but does not support it. Then no copy has
  // started.
  bool copy_batch(unsigned number, std::string_view device, std::span<const DeviceCopy> copies,
                  std::size_t& failed) {
    std::vector<CUdeviceptr> to(copies.size());
    std::vector<CUdeviceptr> from(copies.size());
    std::vector<std::size_t> bytes(copies.size());
    for (std::size_t i = 0; i < copies.size(); ++i) {
      to[i] = address_of(copies[i].to);
      from[i] = address_of(copies[i].from.data());
      bytes[i] = copies[i].from.size();
    }
    Context& context = this->context(device);
    Lane& lane = context.lane(number);
    lane.is_busy = true;
    bool is_supported = true;
    context.call("cuMemcpyBatchAsync", [&] {
      const CUresult result = driver_.copy_batch(to, from, bytes, failed, lane.stream);
      is_supported = result != cuda::not_supported;
      return is_supported ? result : cuda::success;
    });
    return is_supported;
  }

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

void Device::copy_all(unsigned lane, std::string_view device, std::span<const DeviceCopy> copies,
                      std::size_t& failed) {
  for (std::size_t i = 0; i < copies.size(); ++i) {
    failed = i;
    copy(lane, device, copies[i].to, copies[i].from);
  }
}

std::unique_ptr<Device> open_cuda(const std::string& library) {
  return only_errors([&]() -> std::unique_ptr<Device> { return std::make_unique<Cuda>(library); });
}

bool has_cuda(std::string_view device, const std::string& library) {
  try {
    const CudaDriver driver(library);
    CUdevice found = 0;
    driver.check(driver.cuDeviceGet(&found, ordinal_of(device)), "cuDeviceGet", device);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace loadstone
