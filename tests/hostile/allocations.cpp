#include "hostile/allocations.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace loadstone::test {

namespace {

std::atomic<std::size_t> in_use = 0;
std::atomic<std::size_t> in_use_at_reset = 0;
std::atomic<std::size_t> in_use_max = 0;

void* counted(std::size_t bytes, std::size_t alignment) noexcept {
  void* memory = nullptr;
  if (alignment <= alignof(std::max_align_t)) {
    memory = std::malloc(bytes);
  } else if (::posix_memalign(&memory, alignment, bytes) != 0) {
    memory = nullptr;
  }
  if (memory != nullptr) {
    // Counts the usable size, because only this size is known when the memory is freed.
    const std::size_t now = in_use += ::malloc_usable_size(memory);
    std::size_t highest = in_use_max;
    while (highest < now && !in_use_max.compare_exchange_weak(highest, now)) {
    }
  }
  return memory;
}

void* counted_or_throw(std::size_t bytes, std::size_t alignment) {
  void* memory = counted(bytes == 0 ? 1 : bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void release(void* memory) noexcept {
  if (memory != nullptr) in_use -= ::malloc_usable_size(memory);
  std::free(memory);
}

}  // namespace

void AllocationPeak::reset() noexcept {
  in_use_at_reset = in_use.load();
  in_use_max = in_use.load();
}

std::size_t AllocationPeak::bytes() noexcept { return in_use_max - in_use_at_reset; }

}  // namespace loadstone::test

namespace test = loadstone::test;

void* operator new(std::size_t bytes) {
  return test::counted_or_throw(bytes, alignof(std::max_align_t));
}
void* operator new[](std::size_t bytes) {
  return test::counted_or_throw(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return test::counted_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return test::counted_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return test::counted(bytes, alignof(std::max_align_t));
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return test::counted(bytes, alignof(std::max_align_t));
}
void operator delete(void* memory) noexcept { test::release(memory); }
void operator delete[](void* memory) noexcept { test::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { test::release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { test::release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { test::release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { test::release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  test::release(memory);
}
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  test::release(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept { test::release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { test::release(memory); }
