// Linear layers of transformers' class Conv1D, whose weights have the shape [in, out]. Libraries
// that replace linear layers store these weights as nn.Linear has them, [out, in].
#pragma once

#include <optional>
#include <string_view>

#include "loadstone/catalog.h"

namespace loadstone {

// Return true if the model that this config.json describes, or a part of it, has such layers. A
// text that cannot be read describes none.
[[nodiscard]] bool has_conv1d(std::string_view config);

// The same for the config.json in the checkpoint's folder; nothing if there is none.
[[nodiscard]] std::optional<bool> has_conv1d(const Catalog& catalog, Storage* storage);

// Return true for the name of such a weight, in a model that has_conv1d().
[[nodiscard]] bool is_conv1d_weight(std::string_view name) noexcept;

}  // namespace loadstone
