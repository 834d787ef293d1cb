// A driver without a GPU, for tests: device memory is memory of this process that was told to it.
// Copies are made when somebody waits for them, of the bytes that then stand there. C linkage, so
// that Python can call it too. Thread-safe. There are drivers of CUDA 13, of 12.8 and of before,
// which differ by the calls that copy batches; they share these functions and what these know.
#pragma once

#include <cstddef>

extern "C" {
// Forgets everything, failures that were asked for included.
void fake_cuda_reset();
// [address, address + bytes) is memory of this device: 0 or 1.
void fake_cuda_register(void* address, std::size_t bytes, int device);
// The call of this number (from 0) of a function returns a result that is no success. With "lost"
// as function, each call from that copy on does.
void fake_cuda_fail(const char* function, int number, int result);
// The call of this number of a function that copies a batch fails at this copy of it, once those
// before it have begun.
void fake_cuda_fail_copy(const char* function, int number, std::size_t position, int result);
// What a driver would have punished: copies outside of device memory or from memory that is not
// pinned, streams of another context, things freed while they are used. A line each.
const char* fake_cuda_violations();
// Pinned allocations, streams, events and retained contexts that nobody gave back.
int fake_cuda_live();
// Of pinned allocations, at once.
std::size_t fake_cuda_pinned_peak();
// How often a function was called.
int fake_cuda_calls(const char* function);
// Adds a line to the order of calls, which has "copy S", "batch S COPIES" and "wait S" for stream
// S.
void fake_cuda_note(const char* line);
const char* fake_cuda_order();
}
