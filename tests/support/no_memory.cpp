#include "support/no_memory.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <string_view>

namespace loadstone::test {

namespace {

thread_local bool is_refused = false;
std::atomic<std::int64_t> allowed = INT64_MAX;

// An exception that passes through RE2 corrupts the heap, because RE2 is not exception-safe.
bool is_called_by_re2() noexcept {
  std::array<void*, 64> frames = {};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  return std::any_of(frames.begin(), frames.begin() + count, [](const void* frame) {
    Dl_info found = {};
    return ::dladdr(frame, &found) != 0 && found.dli_sname != nullptr &&
           std::string_view(found.dli_sname).find("3re2") != std::string_view::npos;
  });
}

void* allocated(std::size_t bytes) noexcept {
  const bool is_last = allowed.fetch_sub(1, std::memory_order_relaxed) == 1;
  if (is_refused || (is_last && !is_called_by_re2())) return nullptr;
  return std::malloc(bytes == 0 ? 1 : bytes);
}

void* allocated_or_throw(std::size_t bytes) {
  void* const memory = allocated(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void end_memory_of_this_thread() noexcept { is_refused = true; }

void fail_allocation(std::uint64_t number) noexcept { allowed = static_cast<std::int64_t>(number); }
bool forget_failure() noexcept { return allowed.exchange(INT64_MAX) < 1; }

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
