// Operator new with failures on request, for the whole binary.
#pragma once

#include <cstdint>

namespace loadstone::test {

// From now on every allocation of this thread throws std::bad_alloc until the thread ends, even
// after a catch.
void end_memory_of_this_thread() noexcept;

// Only the `number`-th allocation from now on (from 1), in any thread, throws std::bad_alloc. If
// RE2 makes that allocation, none does.
void fail_allocation(std::uint64_t number) noexcept;
// Stops failures; returns true if the failing allocation was reached.
bool forget_failure() noexcept;

}  // namespace loadstone::test
