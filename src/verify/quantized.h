// Checks quantized weights: their scales, and the distance of decoded values from the originals.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/verify.h"
#include "verify/element_reader.h"
#include "verify/numbers.h"
#include "verify/pairs.h"

namespace loadstone {

// Reports scales that are not finite ("q.nan"), and divisors that are not positive
// ("q.scale_value").
[[nodiscard]] std::vector<Finding> check_scales(const OpenShards& shards,
                                                const QuantizedTensors& stored,
                                                const std::atomic<bool>& stop);

// Compares samples of two values, at least one of which is quantized. Not thread-safe.
class Samples {
 public:
  Samples(const OpenShards& first, const OpenShards& second, std::atomic<bool>& stop);

  // Compares a pair and adds its error to `report`. Also adds a difference if the encoding does not
  // explain the error.
  void compare(const Pair& pair, VerifyReport& report);
  [[nodiscard]] std::uint64_t bytes_read() const noexcept;

 private:
  std::atomic<bool>& stop_;
  Numbers first_;
  Numbers second_;
};

}  // namespace loadstone
