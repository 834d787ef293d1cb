// Memory straight from the system: zero, costs nothing until touched, given back at once when
// freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace loadstone {

// Owns its pages. Not thread-safe while moved; the memory itself is anybody's.
class AnonymousMemory {
 public:
  AnonymousMemory() = default;
  // Throws Error "memory.host".
  explicit AnonymousMemory(std::uint64_t byte_count);
  AnonymousMemory(AnonymousMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AnonymousMemory& operator=(AnonymousMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~AnonymousMemory();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace loadstone
