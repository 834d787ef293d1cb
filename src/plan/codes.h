// Codes of a quantized tensor are either delivered unchanged with their scales, or decoded; a cast
// does not decode them. Only this file decides which.
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
  plain,      // its values, unchanged or cast
  component,  // a component of a quantized tensor, unchanged: never cast
  numbers,    // decoded values of its codes
  neither,    // something between the two, which is refused
};

// A catalog's quantized tensors, and the components that targets use. The catalog must outlive it.
// Not thread-safe while targets are added.
class Codes {
 public:
  explicit Codes(const Catalog& catalog);

  // Records that a target uses the tensor under its name.
  void mark_taken(std::uint32_t tensor) { is_taken_[tensor] = true; }
  // The caller answers for it.
  void mark_known(std::uint32_t tensor) { is_known_[tensor] = true; }

  // For a target with dtype `asked` in the model. A target is a component if it has the component's
  // dtype and shape, and all scales that the codes need have targets too. It gets decoded values if
  // it is floating-point, unlike the codes, and none of their scales has a target. `shape`: the
  // target's if it uses the whole tensor; null: dtypes alone decide.
  [[nodiscard]] SourceUse source_use(std::uint32_t tensor, Dtype asked, const Shape* shape) const;

  // Returns the error for a target that can use neither a component nor values.
  [[nodiscard]] Finding refuse(std::uint32_t tensor, std::string_view target, Dtype asked) const;

  // The first tensor that the target gets without decoding although it contains codes of a dtype
  // other than the target's, or codes whose scales are unused. `delivered`: by tensor of the
  // catalog, true if it is used.
  struct Lone {
    std::uint32_t tensor;
    Finding error;
  };
  [[nodiscard]] std::optional<Lone> find_lone(const PlannedTarget& target,
                                              const std::vector<bool>& delivered) const;

  // Null: the tensor has no codes.
  [[nodiscard]] const QuantizedTensor* find(std::uint32_t tensor) const noexcept {
    return quantized_.find(tensor);
  }
  // Marks the tensor and all components of its codes.
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

// True for each tensor of the catalog that the plan delivers without a decoding.
[[nodiscard]] std::vector<bool> delivered_codes(const Plan& plan);

}  // namespace loadstone
