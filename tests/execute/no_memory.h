// Operator new that fails when it is told to, in this whole binary.
#pragma once

namespace loadstone::test {

// From now on every allocation of this thread throws std::bad_alloc, until the thread ends: also
// where what was thrown is caught.
void end_memory_of_this_thread() noexcept;

}  // namespace loadstone::test
