// The quantized tensors of a checkpoint, each with its components.
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

// All quantized tensors of one catalog. Immutable after construction, so thread-safe.
class LOADSTONE_API QuantizedTensors {
 public:
  QuantizedTensors() = default;
  // `count`: tensors in the catalog. `companions`: marks further tensors that belong to codes.
  QuantizedTensors(std::vector<QuantizedTensor> tensors, std::vector<Finding> warnings,
                   std::vector<bool> companions, std::size_t count);

  // In the catalog's order.
  [[nodiscard]] const std::vector<QuantizedTensor>& tensors() const noexcept { return tensors_; }
  // Errors "q.scale_missing", "q.scale_shape", "q.quant_state" ... for tensors that cannot be read,
  // then warnings "q.scale_unused" for scales without codes.
  [[nodiscard]] const std::vector<Finding>& findings() const noexcept { return findings_; }
  [[nodiscard]] bool empty() const noexcept { return tensors_.empty(); }
  // Returns true if at least one can be decoded.
  [[nodiscard]] bool has_readable() const noexcept;

  // Returns the quantized tensor whose codes these are. Null: plain values, or scales.
  [[nodiscard]] const QuantizedTensor* find(std::uint32_t tensor) const noexcept;
  // Returns true for a component of a quantized tensor other than its codes: a scale, a state, a
  // table, or a scale of activations.
  [[nodiscard]] bool is_companion(std::uint32_t tensor) const noexcept;
  // Returns true for codes and for other components.
  [[nodiscard]] bool is_component(std::uint32_t tensor) const noexcept {
    return is_companion(tensor) || find(tensor) != nullptr;
  }

 private:
  std::vector<QuantizedTensor> tensors_;
  std::vector<Finding> findings_;
  std::vector<std::uint32_t> by_data_;  // empty: no quantized tensors
  std::vector<bool> is_companion_;      // as long as by_data_
};

// Recognises the layouts of DeepSeek (weight_scale_inv), ModelOpt and compressed-tensors
// (weight_scale, weight_scale_2; weight_packed, weight_global_scale), GPT-OSS (_blocks, _scales)
// and bitsandbytes. Reads states and tables of bitsandbytes, about 200 bytes each and 1 KiB if
// scales are nested, through `storage`; null: the catalog's. Catalog::quantized() caches the
// result.
[[nodiscard]] LOADSTONE_API QuantizedTensors find_quantized_tensors(const Catalog& catalog,
                                                                    Storage* storage = nullptr);

}  // namespace loadstone
