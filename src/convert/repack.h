// Copies quantized tensors to the components of a different style without encoding them again.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "convert/values.h"

namespace loadstone {

// Returns true if the options have a style and no encoding: quantized tensors then get the
// components of the style, and no value changes.
[[nodiscard]] bool repacks(const ConvertOptions& options) noexcept;
// Returns the style's components for each quantized tensor, and for GGUF blocks that the style
// supports. Adds errors "convert.lossy" for tensors whose values would change, and a warning
// "convert.rounded" for global scales that are rounded to the nearest inverse. Throws Error
// "plan.options" if there is nothing to repack.
[[nodiscard]] Values repacked_values(const std::shared_ptr<const Catalog>& catalog,
                                     const ConvertOptions& options, std::vector<Finding>& findings);
// Returns the names of the targets that contain the components.
[[nodiscard]] std::set<std::string_view> repacked_targets(
    const std::vector<RepackedTensor>& repacked);
// Describes how many global scales are rounded, and by how much; empty if none is.
[[nodiscard]] std::string rounding_text(const std::vector<RepackedTensor>& repacked);

}  // namespace loadstone
