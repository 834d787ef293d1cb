// Operator new that fails when it is told to, in this whole binary.
#pragma once

#include <cstdint>

namespace loadstone::test {

// From now on every allocation of this thread throws std::bad_alloc, until the thread ends: also
// where what was thrown is caught.
void end_memory_of_this_thread() noexcept;

// The `number`-th allocation from now on (from 1), by whatever thread, throws std::bad_alloc; no
// other does. Where it is one of RE2's, none does.
void fail_allocation(std::uint64_t number) noexcept;
// No allocation fails any more. Whether that one was reached.
bool forget_failure() noexcept;

}  // namespace loadstone::test
