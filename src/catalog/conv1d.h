// Linear layers of transformers' class Conv1D, whose weights have the shape [in, out]. Libraries
// that replace linear layers store these weights as nn.Linear has them, [out, in].
#pragma once

#include <optional>
#include <string_view>

#include "loadstone/catalog.h"

namespace loadstone {

// Returns true if the model of this config.json, or a part of it, has such layers. Returns false
// for an invalid text.
[[nodiscard]] bool has_conv1d(std::string_view config);

// The same for the config.json in the checkpoint's folder; nullopt without one.
[[nodiscard]] std::optional<bool> has_conv1d(const Catalog& catalog, Storage* storage);

// Return true for the name of such a weight, in a model that has_conv1d().
[[nodiscard]] bool is_conv1d_weight(std::string_view name) noexcept;

}  // namespace loadstone
