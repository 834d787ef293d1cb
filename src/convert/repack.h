// Codes that stay as they are in the components of another style.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "convert/values.h"

namespace loadstone {

// Returns true if quantized tensors get the components of another style, and no number changes: the
// options name a style and no encoding.
[[nodiscard]] bool repacks(const ConvertOptions& options) noexcept;
// The components that the style has for each quantized tensor, and for blocks of codes that it
// holds as well. Errors "convert.lossy" name those that cannot be had without changing a number.
// Throws Error "plan.options" where there is nothing to repack.
[[nodiscard]] Values repacked_values(const std::shared_ptr<const Catalog>& catalog,
                                     QuantizeStyle style, std::vector<Finding>& findings);
// Names of the targets that hold the components.
[[nodiscard]] std::set<std::string_view> repacked_targets(
    const std::vector<RepackedTensor>& repacked);
// The number that scales are to be divided by in place of being multiplied with `factor`, where
// each scale in F8_E4M3 then comes to the same F32; and the reverse. Nothing: there is none.
[[nodiscard]] std::optional<float> same_divisor(float factor) noexcept;
[[nodiscard]] std::optional<float> same_factor(float divisor) noexcept;

}  // namespace loadstone
