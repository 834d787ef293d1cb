// Defines the first version of cuMemcpyBatchAsync, from CUDA 12.8, which reports the index of the
// failed copy.
#include "fake_state.h"

using namespace fake_cuda;

extern "C" int cuMemcpyBatchAsync(unsigned long long* to, unsigned long long* from,
                                  std::size_t* bytes, std::size_t count, Attributes* attributes,
                                  std::size_t* first_of_attributes, std::size_t attribute_count,
                                  std::size_t* failed, void* stream) {
  const std::lock_guard lock(mutex());
  *failed = SIZE_MAX;
  return copy_batch(
      "cuMemcpyBatchAsync",
      {to, from, bytes, count, attributes, first_of_attributes, attribute_count, stream}, *failed);
}
