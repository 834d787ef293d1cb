// A CUDA driver without a GPU, for tests: registered memory of this process acts as device memory.
// Copies happen when a caller waits for them, with the source bytes of that moment. C linkage, so
// that Python can call it too. Thread-safe. Three libraries act as CUDA 13, 12.8 and older; they
// differ in the calls for batches of copies, and share these functions and their state.
#pragma once

#include <cstddef>

extern "C" {
// Resets all state, including requested failures.
void fake_cuda_reset();
// Makes [address, address + bytes) memory of device 0 or 1.
void fake_cuda_register(void* address, std::size_t bytes, int device);
// Makes call `number` (from 0) of a function return `result`. With function "lost", every call from
// that copy on returns it.
void fake_cuda_fail(const char* function, int number, int result);
// Makes call `number` of a batch function fail at copy `position`, after the earlier copies have
// started.
void fake_cuda_fail_copy(const char* function, int number, std::size_t position, int result);
// Misuse that a driver would punish, one line each: copies outside of device memory or from
// unpinned memory, streams of a different context, and objects freed while in use.
const char* fake_cuda_violations();
// Pinned allocations, streams, events and retained contexts that were not released.
int fake_cuda_live();
// Peak of pinned bytes.
std::size_t fake_cuda_pinned_peak();
// Calls of a function since the reset.
int fake_cuda_calls(const char* function);
// Appends to the log of calls, which has "copy S", "batch S COPIES" and "wait S" for stream S.
void fake_cuda_note(const char* line);
const char* fake_cuda_order();
}
