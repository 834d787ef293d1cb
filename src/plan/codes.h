// Codes of a quantized tensor are no numbers: they are delivered as they are, together with their
// scales, or decoded. No cast makes numbers of them. This is the one place that decides which.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

// How a target takes the tensor that it gets.
enum class SourceUse : std::uint8_t {
  plain,      // its numbers, as they are in the file or cast
  component,  // a part of a quantized tensor, as it is: never cast
  numbers,    // those that its codes stand for
  neither,    // something between the two, which is refused
};

// One catalog's quantized tensors, and which of their components targets take. The catalog must
// outlive it. Not thread-safe while it is told of targets.
class Codes {
 public:
  explicit Codes(const Catalog& catalog);

  // A target of the model takes the tensor under its name.
  void mark_taken(std::uint32_t tensor) { is_taken_[tensor] = true; }
  // The caller answers for it.
  void mark_known(std::uint32_t tensor) { is_known_[tensor] = true; }

  // For a target to which the model gave the dtype `asked`. A target is a component where it has
  // the component's dtype and shape, and all scales that the codes need have targets too. It gets
  // numbers where it is floating, no likeness of the codes, and no scale of theirs has a target.
  // `shape`: the target's, where it takes the whole tensor; else null, and dtypes alone say it.
  [[nodiscard]] SourceUse source_use(std::uint32_t tensor, Dtype asked, const Shape* shape) const;

  // The error for a target that takes neither a component nor numbers.
  [[nodiscard]] Finding refuse(std::uint32_t tensor, std::string_view target, Dtype asked) const;

  // The first tensor that the target gets as it is, without a decoding, where it holds codes of
  // another dtype than the target's, or where nothing takes their scales. `delivered`: by tensor
  // of the catalog, whether something takes it.
  struct Lone {
    std::uint32_t tensor;
    Finding error;
  };
  [[nodiscard]] std::optional<Lone> find_lone(const PlannedTarget& target,
                                              const std::vector<bool>& delivered) const;

  // Null: the tensor holds no codes of a quantized tensor.
  [[nodiscard]] const QuantizedTensor* find(std::uint32_t tensor) const noexcept {
    return quantized_.find(tensor);
  }
  // Marks all that belongs to the tensor's codes, and itself.
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

// True for each tensor of the catalog that the plan delivers as it is, without a decoding.
[[nodiscard]] std::vector<bool> delivered_codes(const Plan& plan);

}  // namespace loadstone
