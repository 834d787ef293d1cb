// Recognises linear layers of transformers' class Conv1D, whose weights have the shape [in, out].
// Libraries that replace linear layers store these weights as nn.Linear does, [out, in].
#pragma once

#include <optional>
#include <string_view>

#include "loadstone/catalog.h"

namespace loadstone {

// Returns true if the model of this config.json, or a part of it, has such layers. Returns false
// if the text is invalid.
[[nodiscard]] bool has_conv1d(std::string_view config);

// Checks the config.json in the checkpoint's folder. Returns nullopt if the file is missing.
[[nodiscard]] std::optional<bool> has_conv1d(const Catalog& catalog, Storage* storage);

// Returns true for names of Conv1D weights, provided that the model has_conv1d().
[[nodiscard]] bool is_conv1d_weight(std::string_view name) noexcept;

}  // namespace loadstone
