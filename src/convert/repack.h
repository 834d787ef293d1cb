// Codes that are kept, in the components of a different style.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "convert/values.h"

namespace loadstone {

// Returns true if quantized tensors get the components of a different style and no value changes:
// the options have a style and no encoding.
[[nodiscard]] bool repacks(const ConvertOptions& options) noexcept;
// Returns the style's components for each quantized tensor, and for blocks of codes that it
// supports. Errors "convert.lossy" name those that would change a value. Throws Error
// "plan.options" if there is nothing to repack.
[[nodiscard]] Values repacked_values(const std::shared_ptr<const Catalog>& catalog,
                                     QuantizeStyle style, std::vector<Finding>& findings);
// Returns the targets that contain the components.
[[nodiscard]] std::set<std::string_view> repacked_targets(
    const std::vector<RepackedTensor>& repacked);
// same_divisor() returns the divisor that gives the same F32 as multiplication by `factor`, for
// every scale in F8_E4M3; nullopt if there isn't one. same_factor() is the inverse.
[[nodiscard]] std::optional<float> same_divisor(float factor) noexcept;
[[nodiscard]] std::optional<float> same_factor(float divisor) noexcept;

}  // namespace loadstone
