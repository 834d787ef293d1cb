// Declares a CUDA driver for tests without a GPU, in which registered memory of this process acts
// as device memory. A copy reads its source bytes only when a caller waits for the copy. The
// functions have C linkage, so Python can call them too, and are thread-safe. Three libraries act
// as CUDA 13, CUDA 12.8 and older versions. They differ only in the functions for batches of
// copies, and share all other functions and the state.
#pragma once

#include <cstddef>

extern "C" {
// Resets all state, including requested failures.
void fake_cuda_reset();
// Registers [address, address + bytes) as memory of a device, 0 or 1.
void fake_cuda_register(void* address, std::size_t bytes, int device);
// Makes call `number` (from 0) of a function return `result`. If `function` is "lost", copy
// `number` and every later call of any function return `result`.
void fake_cuda_fail(const char* function, int number, int result);
// Makes call `number` of a batch function fail at the copy with index `position`. Earlier copies of
// the batch have started by then.
void fake_cuda_fail_copy(const char* function, int number, std::size_t position, int result);
// Returns the misuse that a real driver would punish, one line each: copies outside of device
// memory or from unpinned memory, streams of a different context, and objects that were freed while
// in use.
const char* fake_cuda_violations();
// Returns the number of pinned allocations, streams, events and retained contexts that were not
// released.
int fake_cuda_live();
// Returns the largest number of bytes that were pinned at once.
std::size_t fake_cuda_pinned_peak();
// Returns the number of calls of a function since the reset.
int fake_cuda_calls(const char* function);
// Appends a line to the log of calls. The driver logs "copy S", "batch S COPIES" and "wait S" for
// stream S.
void fake_cuda_note(const char* line);
const char* fake_cuda_order();
}
