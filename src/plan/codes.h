// Decides how targets use the codes of quantized tensors: unchanged together with their scales, or
// decoded. A cast does not decode codes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

// The use of a tensor by a target.
enum class SourceUse : std::uint8_t {
  plain,      // the tensor's values, unchanged or cast
  component,  // a component of a quantized tensor, which is never cast
  numbers,    // values decoded from the codes
  neither,    // neither component nor values: rejected
};

// The quantized tensors of a catalog, and the components that targets use. The catalog must outlive
// this object. Not thread-safe while targets are added.
class Codes {
 public:
  explicit Codes(const Catalog& catalog);

  // Records that a target of the same name uses the tensor.
  void mark_taken(std::uint32_t tensor) { is_taken_[tensor] = true; }
  // Records that the caller handles the tensor outside the plan.
  void mark_known(std::uint32_t tensor) { is_known_[tensor] = true; }

  // Returns how a target of dtype `asked` uses the tensor. The target gets a component if it has
  // the dtype and shape of the component, and the scales of the codes also have targets. The target
  // gets decoded values if it is floating-point, its dtype differs from that of the codes, and no
  // scale has a target. `shape` is the target's shape if the target uses the whole tensor. If
  // `shape` is null, only dtypes are compared.
  [[nodiscard]] SourceUse source_use(std::uint32_t tensor, Dtype asked, const Shape* shape) const;

  // Returns the error for a target that can use neither a component nor decoded values.
  [[nodiscard]] Finding refuse(std::uint32_t tensor, std::string_view target, Dtype asked) const;

  // The first tensor whose codes the target gets undecoded although they are useless to the target:
  // their dtype is not the target's, or their scales are unused. `delivered[i]` is true if the plan
  // delivers tensor i of the catalog undecoded.
  struct Lone {
    std::uint32_t tensor;
    Finding error;
  };
  [[nodiscard]] std::optional<Lone> find_lone(const PlannedTarget& target,
                                              const std::vector<bool>& delivered) const;

  // Returns null if the tensor has no codes.
  [[nodiscard]] const QuantizedTensor* find(std::uint32_t tensor) const noexcept {
    return quantized_.find(tensor);
  }
  // Marks the tensor and all components of its quantized tensor.
  void mark_components(std::uint32_t tensor, std::vector<bool>& marked) const;

 private:
  [[nodiscard]] std::optional<Finding> refuse_as_it_is(std::uint32_t tensor,
                                                       std::string_view target, Dtype dtype,
                                                       const std::vector<bool>& delivered) const;
  [[nodiscard]] const QuantizedTensor* owner_of(std::uint32_t tensor) const;
  [[nodiscard]] Finding between(const QuantizedTensor& quantized, std::string_view target) const;

  const Catalog& catalog_;
  const QuantizedTensors& quantized_;
  std::vector<bool> is_taken_;
  std::vector<bool> is_known_;
};

// Returns true at the index of each tensor of the catalog that the plan delivers undecoded.
[[nodiscard]] std::vector<bool> delivered_codes(const Plan& plan);

}  // namespace loadstone
