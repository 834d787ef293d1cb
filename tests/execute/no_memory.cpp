#include "execute/no_memory.h"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace loadstone::test {

namespace {

thread_local bool is_refused = false;

void* allocated(std::size_t bytes) noexcept {
  return is_refused ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}

void* allocated_or_throw(std::size_t bytes) {
  void* const memory = allocated(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void end_memory_of_this_thread() noexcept { is_refused = true; }

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
