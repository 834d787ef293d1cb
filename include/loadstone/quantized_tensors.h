// The quantized tensors of a checkpoint: tensors of the file that only together mean numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/quantized_tensor.h"
#include "loadstone/storage.h"

namespace loadstone {

// All of one catalog. Immutable once made, so thread-safe.
class LOADSTONE_API QuantizedTensors {
 public:
  QuantizedTensors() = default;
  // `count`: of the catalog's tensors. `companions`: marks others that belong to codes.
  QuantizedTensors(std::vector<QuantizedTensor> tensors, std::vector<Finding> warnings,
                   std::vector<bool> companions, std::size_t count);

  // In the catalog's order.
  [[nodiscard]] const std::vector<QuantizedTensor>& tensors() const noexcept { return tensors_; }
  // Errors "q.scale_missing", "q.scale_shape", "q.quant_state" ... of those that cannot be read,
  // then warnings "q.scale_unused" for scales of nothing.
  [[nodiscard]] const std::vector<Finding>& findings() const noexcept { return findings_; }
  [[nodiscard]] bool empty() const noexcept { return tensors_.empty(); }
  // Whether any of them can be decoded.
  [[nodiscard]] bool has_readable() const noexcept;

  // The one whose codes the tensor holds. Null: its values are plain numbers, or those of a scale.
  [[nodiscard]] const QuantizedTensor* find(std::uint32_t tensor) const noexcept;
  // Whether the tensor belongs to another one's codes: a scale, a state, a table of them, or a
  // scale of the activations that they are multiplied with.
  [[nodiscard]] bool is_companion(std::uint32_t tensor) const noexcept;
  // Returns whether the tensor holds codes or belongs to some.
  [[nodiscard]] bool is_component(std::uint32_t tensor) const noexcept {
    return is_companion(tensor) || find(tensor) != nullptr;
  }

 private:
  std::vector<QuantizedTensor> tensors_;
  std::vector<Finding> findings_;
  std::vector<std::uint32_t> by_data_;  // empty: there are none
  std::vector<bool> is_companion_;      // as long as by_data_
};

// The layouts of DeepSeek (weight_scale_inv), ModelOpt and compressed-tensors (weight_scale,
// weight_scale_2; weight_packed, weight_global_scale), GPT-OSS (_blocks, _scales) and bitsandbytes.
// Reads the states and tables of bitsandbytes, some 200 bytes each and 1 KiB where scales are
// nested, through `storage`; null: the catalog's. Catalog::quantized() keeps the result.
[[nodiscard]] LOADSTONE_API QuantizedTensors find_quantized_tensors(const Catalog& catalog,
                                                                    Storage* storage = nullptr);

}  // namespace loadstone
