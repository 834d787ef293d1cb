// What verify looks at in weights that are stored quantized: their scales, and how far what they
// mean is from the numbers that they were made of.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/verify.h"
#include "verify/tensor_bytes.h"

namespace loadstone {

// Scales that are not finite ("q.nan"), or not above zero where they divide ("q.scale_value").
[[nodiscard]] std::vector<Finding> check_scales(const OpenShards& shards,
                                                const QuantizedTensors& stored);

// Values that are quantized in one of two checkpoints, or in both but differently.
class QuantizedPairs {
 public:
  QuantizedPairs(const Catalog& first, const Catalog& second);

  // Whether the tensor is part of a pair, so that it has no partner of its own name.
  [[nodiscard]] bool covers_first(std::uint32_t tensor) const { return in_first_[tensor]; }
  [[nodiscard]] bool covers_second(std::uint32_t tensor) const { return in_second_[tensor]; }

  // Reads samples of both. Adds to `report` each pair's error, and a difference where that is more
  // than the encoding explains.
  void measure(const OpenShards& first_shards, const OpenShards& second_shards,
               VerifyReport& report) const;

 private:
  struct Side {
    const Catalog* catalog = nullptr;
    const QuantizedTensor* stored = nullptr;  // null: a tensor of its own, of numbers or of blocks
    std::uint32_t tensor = 0;
    [[nodiscard]] Shape shape() const;
    [[nodiscard]] std::string_view encoding() const;
    [[nodiscard]] bool is_quantized() const;
  };
  struct Pair {
    std::string name;
    Side first;
    Side second;
  };

  void add(const std::string& name, const QuantizedTensor* first, const QuantizedTensor* second);
  void add_blocks();
  void keep(Pair pair);
  static void cover(const Side& side, std::vector<bool>& covered);

  const Catalog& first_;
  const Catalog& second_;
  std::vector<bool> in_first_;
  std::vector<bool> in_second_;
  std::vector<Pair> pairs_;
};

}  // namespace loadstone
