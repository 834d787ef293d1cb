// Memory that the processor cannot write to: a GPU's. Bytes get there by copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "loadstone/export.h"

namespace loadstone {

// A copy from memory of the host to memory of a device.
struct DeviceCopy {
  std::byte* to = nullptr;
  std::span<const std::byte> from;
};

// Copies for one load, which calls it from several threads at once. Copies are in lanes, numbered
// from 0: a lane is used by one thread at a time, and its copies arrive in their order. What a
// function throws ends the load; Error "device.driver" is for calls that fail.
class LOADSTONE_API Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  // Memory of the host that copies to this device, and others, are made from, pinned where that
  // makes them quicker. Called once; given back when no copy is under way. Throws Error
  // "memory.host".
  [[nodiscard]] virtual std::byte* allocate(std::string_view device, std::uint64_t bytes) = 0;
  virtual void free(std::byte* memory) noexcept = 0;

  // Begins to copy to memory of a device ("cuda:1"). `from` stays as it is until wait().
  virtual void copy(unsigned lane, std::string_view device, std::byte* to,
                    std::span<const std::byte> from) = 0;
  // Begins several copies of small values, in any order; without an override, each by copy().
  // `failed`: where it throws, the position of the copy that failed; left as it is where nobody
  // knows.
  virtual void copy_all(unsigned lane, std::string_view device, std::span<const DeviceCopy> copies,
                        std::size_t& failed);
  // Returns when all copies of the lane have arrived, on whatever device.
  virtual void wait(unsigned lane) = 0;
  // Copies memory of a device back.
  virtual void read(std::string_view device, const std::byte* from, std::span<std::byte> to) = 0;
};

// By NVIDIA's driver, which is loaded here and needs no toolkit: "cuda:N" is the N-th device that
// it shows to this process, and "cuda" the first one. A device is touched by its first copy, in its
// primary context, as torch has it. Copies run on streams of their own: before a load, the caller
// waits for what is still under way in the destinations. Throws Error "device.driver" where
// `library` cannot be loaded, or has no device.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Device> open_cuda(
    const std::string& library = "libcuda.so.1");

}  // namespace loadstone
