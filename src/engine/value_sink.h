// The destination of values that are made window by window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace loadstone {

// Memory or files. A value that is not quantized has one part; others have those of
// quantized_parts(). Thread-safe.
class ValueSink {
 public:
  ValueSink() = default;
  ValueSink(const ValueSink&) = delete;
  ValueSink& operator=(const ValueSink&) = delete;
  virtual ~ValueSink() = default;

  // The address of the part's first byte: bytes are about to be made in their place. Null: write()
  // brings them.
  [[nodiscard]] virtual std::byte* place(std::uint32_t value, std::size_t part) = 0;
  // Returns memory in which bytes are best made; this thread's next write() sends them from there.
  // Null: anywhere.
  [[nodiscard]] virtual std::byte* room(std::uint32_t, std::uint64_t) { return nullptr; }
  // Stores bytes of a component, `offset` bytes from its start. May change them in place.
  virtual void write(std::uint32_t value, std::size_t part, std::uint64_t offset,
                     std::span<std::byte> bytes) = 0;
  // Reports bytes of a part that were made in place and are final.
  virtual void made(std::uint32_t /*value*/, std::size_t /*part*/,
                    std::span<const std::byte> /*bytes*/) {}
  // All bytes of the value are in their places, or on their way.
  virtual void finish(std::uint32_t value) = 0;
};

}  // namespace loadstone
