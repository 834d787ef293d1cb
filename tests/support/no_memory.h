// Replaces operator new of the whole binary by one that fails on request.
#pragma once

#include <cstdint>

namespace loadstone::test {

// Makes every later allocation of this thread throw std::bad_alloc until the thread ends.
void end_memory_of_this_thread() noexcept;

// Makes only allocation `number`, counted from 1 at this call over all threads, throw
// std::bad_alloc. If RE2 makes this allocation, no allocation fails.
void fail_allocation(std::uint64_t number) noexcept;
// Ends the request. Returns true if the failing allocation was reached.
bool forget_failure() noexcept;

}  // namespace loadstone::test
