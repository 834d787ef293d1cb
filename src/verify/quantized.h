// Checks quantized weights: their scales, and the distance of decoded values from the originals.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "catalog/open_shards.h"
#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/verify.h"
#include "verify/pairs.h"

namespace loadstone {

// Reports scales that are not finite ("q.nan"), and divisors that are not positive
// ("q.scale_value").
[[nodiscard]] std::vector<Finding> check_scales(const OpenShards& shards,
                                                const QuantizedTensors& stored,
                                                const std::atomic<bool>& stop);

// The result of comparing a pair of values of which at least one is quantized.
struct SampledPair {
  QuantizationError error;
  std::optional<Difference> difference{};  // set if the encoding does not explain the error
  bool is_sampled = false;                 // false: all values were compared
  std::uint64_t bytes_read = 0;
};

// Compares samples of a pair. Different threads may compare different pairs. If `stop` becomes
// true, returns early with an undefined result.
[[nodiscard]] SampledPair compare_samples(const Pair& pair, const OpenShards& first,
                                          const OpenShards& second, std::atomic<bool>& stop);

// Returns the bytes that compare_samples() reads unless it compares all values of a large pair.
[[nodiscard]] std::uint64_t bytes_of_samples(const Pair& pair, const Catalog& first,
                                             const Catalog& second);

}  // namespace loadstone
