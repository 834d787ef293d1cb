// Codes of a quantized tensor are no numbers: they are delivered as they are, together with their
// scales, or decoded. No cast makes numbers of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/components.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// One catalog's quantized tensors. Immutable once made, so thread-safe. The catalog must outlive
// it.
class Codes {
 public:
  explicit Codes(const Catalog& catalog) : catalog_(catalog), components_(catalog) {}

  // Whether a target of this dtype was made for the tensor itself: codes that are stored in it, or
  // a scale. The dtype that a caller asks for is that of numbers.
  [[nodiscard]] bool keep_dtype(std::uint32_t tensor, Dtype dtype) const;

  // An error for a source that would be copied into a target of `wanted`, where that is a cast of
  // codes. `asked` is the dtype that the model gave the target: another `wanted` makes the codes'
  // dtype that of a target that was made for numbers.
  [[nodiscard]] std::optional<Finding> refuse_cast(std::uint32_t source, std::string_view target,
                                                   Dtype wanted, Dtype asked) const;

  // An error for a source that is delivered as it is while its scales are left behind: `delivered`
  // says of each tensor of the catalog whether something takes it.
  [[nodiscard]] std::optional<Finding> refuse_lone(std::uint32_t source, std::string_view target,
                                                   const std::vector<bool>& delivered) const;

  // Adds the scales and states of a source.
  void mark_companions(std::uint32_t source, std::vector<bool>& marked) const;

 private:
  const Catalog& catalog_;
  ComponentsByData components_;
};

}  // namespace loadstone
