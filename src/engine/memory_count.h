// Counts the memory for bytes in flight, and enforces the limit that the plan promises.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/pages.h"

namespace loadstone {

// Counts the memory of all threads. Thread-safe.
class MemoryCount {
 public:
  void take(std::uint64_t bytes) noexcept {
    const std::uint64_t now = bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    std::uint64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  void give_back(std::uint64_t bytes) noexcept {
    bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t bytes_peak() const noexcept {
    return peak_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> bytes_ = 0;
  std::atomic<std::uint64_t> peak_ = 0;
};

// Newly mapped memory for one thread. Only pages that have been written use memory and are counted.
class CountedMemory {
 public:
  // Throws Error "memory.host".
  CountedMemory(MemoryCount& count, std::uint64_t byte_count)
      : count_(&count), memory_(byte_count) {}
  CountedMemory(const CountedMemory&) = delete;
  CountedMemory& operator=(const CountedMemory&) = delete;
  ~CountedMemory() { count_->give_back(used_); }

  [[nodiscard]] std::byte* data() const noexcept { return memory_.data(); }
  [[nodiscard]] std::uint64_t size() const noexcept { return memory_.size(); }
  // Declares that these bytes will be written. Bytes that were declared earlier still count,
  // because their pages are not freed.
  void use(std::uint64_t begin, std::uint64_t end) noexcept {
    written_ += end - begin;
    end_ = std::max(end_, end);
    const std::uint64_t used = std::min(written_, end_);
    count_->take(used - used_);
    used_ = used;
  }

 private:
  MemoryCount* count_;
  AnonymousMemory memory_;
  std::uint64_t written_ = 0;  // includes bytes that were declared more than once
  std::uint64_t end_ = 0;      // end of all bytes ever declared
  std::uint64_t used_ = 0;
};

}  // namespace loadstone
