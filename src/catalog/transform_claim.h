// Transforms that a checkpoint's config applies to activations.
//
// A rotation of weights that another weight undoes is part of the stored values. One that the
// library applies while the model runs is not: without it, the weights belong to no plain model.
#pragma once

#include <optional>
#include <string_view>

#include "base/json_dom.h"
#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

// Adds the online transforms of a section such as "quantization_config".
void add_transforms(QuantizationClaim& claim, const dom::object& section);

// Returns true if the name is that of a stored transform, by what modules call their transforms.
[[nodiscard]] bool may_be_transform(std::string_view tensor_name) noexcept;
// The same, using the config's own names.
[[nodiscard]] bool is_transform(const QuantizationClaim& claim, std::string_view tensor_name);

// The error "plan.encoding" if an activation of the catalog, or of one that it joins, has scales
// that only AWQ's config gives a meaning: the output of the activation is divided by them.
[[nodiscard]] std::optional<Finding> scaled_activation_finding(const Catalog& catalog);

// The error "q.transform" if the config of the catalog, or of one that it joins, has any.
[[nodiscard]] std::optional<Finding> transform_finding(const Catalog& catalog);

}  // namespace loadstone
