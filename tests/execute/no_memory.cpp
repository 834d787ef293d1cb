#include "execute/no_memory.h"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace loadstone::test {

namespace {

thread_local unsigned refusals = 0;

void* allocated(std::size_t bytes) noexcept {
  return refusals > 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}

void* allocated_or_throw(std::size_t bytes) {
  void* const memory = allocated(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

NoMemory::NoMemory() noexcept { ++refusals; }
NoMemory::~NoMemory() { --refusals; }

}  // namespace loadstone::test

namespace test = loadstone::test;

void* operator new(std::size_t bytes) { return test::allocated_or_throw(bytes); }
void* operator new[](std::size_t bytes) { return test::allocated_or_throw(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return test::allocated(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return test::allocated(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
