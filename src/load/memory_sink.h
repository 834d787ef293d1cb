// Provides the engine with a sink that writes to destinations in memory and to the offload folder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/device_ring.h"
#include "engine/limits.h"
#include "engine/memory_count.h"
#include "engine/value_sink.h"
#include "loadstone/device.h"
#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "offload/offload_folder.h"

namespace loadstone {

// Thread-safe.
class MemorySink final : public ValueSink {
 public:
  // The arguments must outlive the sink. If the options contain no device and a destination needs
  // one, the sink opens the CUDA driver. Throws Error "device.driver".
  MemorySink(const Plan& plan, const ValueSet& values, std::span<const Destination> destinations,
             const OffloadFolder& folder, const ExecuteOptions& options, const Budget& budget,
             MemoryCount& memory);

  // Destinations of values that are read directly in the order of the files; null for other values.
  [[nodiscard]] std::span<std::byte* const> whole() const noexcept { return whole_; }
  // Values that are made by windows: quantized values, merges, values without a source, and values
  // on devices.
  [[nodiscard]] std::span<const std::uint32_t> by_windows() const noexcept { return by_windows_; }
  [[nodiscard]] bool has_written(std::uint32_t target) const noexcept { return written_[target]; }

  [[nodiscard]] std::byte* place(std::uint32_t target, std::size_t part) override;
  [[nodiscard]] std::byte* room(std::uint32_t target, std::uint64_t bytes) override;
  void write(std::uint32_t target, std::size_t part, std::uint64_t offset,
             std::span<std::byte> bytes) override;
  void made(std::uint32_t target, std::size_t part, std::span<const std::byte> bytes) override;
  void finish(std::uint32_t target) override { written_[target] = true; }

  // Callback for all bytes that are made in host memory, with the target, the part, and the offset
  // in the part. All threads call it.
  using Watch =
      std::function<void(std::uint32_t, std::size_t, std::uint64_t, std::span<const std::byte>)>;
  void watch(Watch watch) { watch_ = std::move(watch); }

  // Waits until all copies to devices are complete. Call after the threads have ended.
  void complete();
  // Returns true if the target has memory in this load. Its bytes may be read after complete().
  [[nodiscard]] bool has_memory(std::uint32_t target, std::size_t part) const noexcept;
  void read(std::uint32_t target, std::size_t part, std::uint64_t offset, std::span<std::byte> to);

 private:
  [[nodiscard]] std::byte* address(std::uint32_t target, std::size_t part) const noexcept;
  void note_begun(std::uint32_t target) noexcept;
  void open_device(Device* device, std::uint32_t first, const Budget& budget, MemoryCount& memory);

  const ValueSet& values_;
  std::uint8_t* begun_;  // see ExecuteOptions::begun
  Watch watch_;
  std::vector<std::byte*> whole_;
  std::vector<std::vector<std::byte*>> parts_;  // for quantized values and values on devices
  std::vector<bool> is_on_device_;
  std::vector<std::uint32_t> by_windows_;
  std::vector<std::atomic<bool>> written_;
  std::unique_ptr<Device> cuda_;
  Device* device_ = nullptr;
  std::optional<DeviceRing> ring_;  // for destinations on devices
};

}  // namespace loadstone
