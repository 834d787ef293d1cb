// The interface to memory that the CPU cannot access directly, such as a GPU's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "loadstone/export.h"

namespace loadstone {

// A copy from host memory to device memory.
struct DeviceCopy {
  std::byte* to = nullptr;
  std::span<const std::byte> from;
};

// Performs the copies of one load, which calls these functions from several threads at once. Each
// copy belongs to a lane, numbered from 0. One thread at a time uses a lane, and the copies of a
// lane must arrive in order. An exception ends the load; throw Error "device.driver" if a call of
// the driver fails.
class LOADSTONE_API Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  // Allocates host memory from which all copies are made, to any device; pinned if that is faster.
  // loadstone calls this once, and frees the memory when no copy is in flight. Throws Error
  // "memory.host".
  [[nodiscard]] virtual std::byte* allocate(std::string_view device, std::uint64_t bytes) = 0;
  virtual void free(std::byte* memory) noexcept = 0;

  // Starts a copy to a device ("cuda:1"). loadstone does not change `from` before wait() returns.
  virtual void copy(unsigned lane, std::string_view device, std::byte* to,
                    std::span<const std::byte> from) = 0;
  // Starts several small copies, in any order. The default calls copy() for each. Before throwing,
  // sets `failed` to the index of the failed copy, or leaves it unchanged if the index is unknown.
  virtual void copy_all(unsigned lane, std::string_view device, std::span<const DeviceCopy> copies,
                        std::size_t& failed);
  // Returns when all copies of the lane have arrived, on any device.
  virtual void wait(unsigned lane) = 0;
  // Copies device memory to the host.
  virtual void read(std::string_view device, const std::byte* from, std::span<std::byte> to) = 0;
};

// Opens NVIDIA's driver; the CUDA toolkit is not needed. "cuda:N" is the N-th device visible to
// this process, and "cuda" the first. The first copy to a device uses its primary context, like
// torch. Copies run on separate streams, so the caller must first wait for its own work on the
// destinations. Throws Error "device.driver" if `library` cannot be loaded or finds no device.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Device> open_cuda(
    const std::string& library = "libcuda.so.1");

// Returns true if open_cuda() can copy to this device ("cuda:1").
[[nodiscard]] LOADSTONE_API bool has_cuda(std::string_view device,
                                          const std::string& library = "libcuda.so.1");

}  // namespace loadstone
