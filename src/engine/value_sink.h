// Declares the destination of values that are made window by window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "loadstone/quantization.h"

namespace loadstone {

// Memory or files. A value that is not quantized has one part; a quantized value has the parts of
// quantized_parts(). Thread-safe.
class ValueSink {
 public:
  ValueSink() = default;
  ValueSink(const ValueSink&) = delete;
  ValueSink& operator=(const ValueSink&) = delete;
  virtual ~ValueSink() = default;

  // Returns the address of the part's first byte if bytes can be made directly in their
  // destination. Returns null if they must be passed to write().
  [[nodiscard]] virtual std::byte* place(std::uint32_t value, std::size_t part) = 0;
  // Returns memory in which this thread should prepare the bytes of its next write(). Returns null
  // if any memory is suitable.
  [[nodiscard]] virtual std::byte* room(std::uint32_t, std::uint64_t) { return nullptr; }
  // Stores bytes of a component, `offset` bytes from its start. May change them in place.
  virtual void write(std::uint32_t value, std::size_t part, std::uint64_t offset,
                     std::span<std::byte> bytes) = 0;
  // Reports bytes of a part that were made in place and are final.
  virtual void made(std::uint32_t /*value*/, std::size_t /*part*/,
                    std::span<const std::byte> /*bytes*/) {}
  // Returns true if compared() should be called.
  [[nodiscard]] virtual bool compares() const noexcept { return false; }
  // Reports the loss of a value that was decoded from codes and encoded again, or that has blocks
  // that became 0, before finish().
  virtual void compared(std::uint32_t /*value*/, const EncodingLoss& /*loss*/) {}
  // Called when all bytes of the value have been written, or are in flight to a device.
  virtual void finish(std::uint32_t value) = 0;
};

}  // namespace loadstone
