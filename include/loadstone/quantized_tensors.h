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
  // `count`: number of tensors in the catalog. `companions`: true at the index of each tensor that
  // belongs to codes in another tensor.
  QuantizedTensors(std::vector<QuantizedTensor> tensors, std::vector<Finding> warnings,
                   std::vector<bool> companions, std::size_t count);

  // Returns the quantized tensors in the catalog's order.
  [[nodiscard]] const std::vector<QuantizedTensor>& tensors() const noexcept { return tensors_; }
  // Returns errors "q.scale_missing", "q.scale_shape", "q.quant_state" ... for tensors that cannot
  // be decoded, then warnings "q.scale_unused" for scales without codes.
  [[nodiscard]] const std::vector<Finding>& findings() const noexcept { return findings_; }
  [[nodiscard]] bool empty() const noexcept { return tensors_.empty(); }
  // Returns true if at least one tensor can be decoded.
  [[nodiscard]] bool has_readable() const noexcept;

  // Returns the quantized tensor whose codes are stored in `tensor`, an index into
  // Catalog::tensors(). Null: `tensor` does not contain codes.
  [[nodiscard]] const QuantizedTensor* find(std::uint32_t tensor) const noexcept;
  // Returns true if `tensor` is a component of a quantized tensor other than its codes: a scale, a
  // state, a table, or a scale of activations.
  [[nodiscard]] bool is_companion(std::uint32_t tensor) const noexcept;
  // Returns true if `tensor` contains codes or is another component.
  [[nodiscard]] bool is_component(std::uint32_t tensor) const noexcept {
    return is_companion(tensor) || find(tensor) != nullptr;
  }

 private:
  std::vector<QuantizedTensor> tensors_;
  std::vector<Finding> findings_;
  std::vector<std::uint32_t> by_data_;  // index into tensors_, by the index of the codes, or `none`
  std::vector<bool> is_companion_;      // same length as by_data_
};

// Recognises the layouts of DeepSeek (weight_scale_inv), ModelOpt and compressed-tensors
// (weight_scale, weight_scale_2; weight_packed, weight_global_scale), GPT-OSS (_blocks, _scales)
// and bitsandbytes. Reads the states and tables of bitsandbytes, about 200 bytes each, or 1 KiB if
// scales are nested, through `storage`; null: the catalog's storage. Catalog::quantized() caches
// the result.
[[nodiscard]] LOADSTONE_API QuantizedTensors find_quantized_tensors(const Catalog& catalog,
                                                                    Storage* storage = nullptr);

}  // namespace loadstone
