// How quantized tensors stand in files: names, shapes and configs of the libraries that read them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "codec/encode.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone {

// The tensors that a target becomes in a file, without their places. The target itself where it is
// not quantized.
[[nodiscard]] std::vector<OutputTensor> output_tensors(const Conversion& conversion,
                                                       const PlannedTarget& target,
                                                       QuantizeStyle style);

// Whose names components have. Encodings of bitsandbytes have one style, whatever is asked for.
[[nodiscard]] NamingStyle naming_style(const WrittenEncoding& encoding,
                                       QuantizeStyle style) noexcept;
// Throws Error "internal" where the style has no such component.
[[nodiscard]] const ComponentName& component_of(const WrittenEncoding& encoding,
                                                QuantizeStyle style, std::string_view component);
// Of the component so many of a target. A parameter that is no ".weight" gives its name to them.
[[nodiscard]] std::string component_name(const std::string& target, std::size_t part,
                                         std::string_view suffix);

// What of the encoding's name and the style's is asked for together: Error "plan.options" where the
// style does not have it.
void check_style(const QuantizeOptions& options);

// The module that a weight belongs to: "a.weight" is of "a".
[[nodiscard]] std::string_view module_of(std::string_view name) noexcept;

}  // namespace loadstone
