// Defines the version of cuMemcpyBatchAsync from CUDA 13.
#include "fake_state.h"

using namespace fake_cuda;

extern "C" int cuMemcpyBatchAsync_v2(unsigned long long* to, unsigned long long* from,
                                     std::size_t* bytes, std::size_t count, Attributes* attributes,
                                     std::size_t* first_of_attributes, std::size_t attribute_count,
                                     void* stream) {
  const std::lock_guard lock(mutex());
  std::size_t untold = 0;
  return copy_batch(
      "cuMemcpyBatchAsync_v2",
      {to, from, bytes, count, attributes, first_of_attributes, attribute_count, stream}, untold);
}
