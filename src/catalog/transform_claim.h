// Finds transforms that a checkpoint's config applies to activations.
//
// A rotation of weights that another weight undoes is part of the stored values. A rotation that
// the library applies while the model runs is not part of them, so a model without the rotation
// cannot use the weights.
#pragma once

#include <optional>
#include <string_view>

#include "base/json_dom.h"
#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

// Adds the online transforms of a section such as "quantization_config".
void add_transforms(QuantizationClaim& claim, const dom::object& section);

// Returns true if the name looks like that of a stored transform, by the usual names of transforms.
[[nodiscard]] bool may_be_transform(std::string_view tensor_name) noexcept;
// Like may_be_transform(), but uses the names that the config declares.
[[nodiscard]] bool is_transform(const QuantizationClaim& claim, std::string_view tensor_name);

// Returns the error "plan.encoding" if an activation of the catalog, or of a catalog joined in it,
// has scales that only AWQ's config explains, because the activation's output is divided by them.
[[nodiscard]] std::optional<Finding> scaled_activation_finding(const Catalog& catalog);

// Returns the error "q.transform" if the config of the catalog, or of a catalog joined in it, has
// online transforms.
[[nodiscard]] std::optional<Finding> transform_finding(const Catalog& catalog);

}  // namespace loadstone
