// The tensors of a torch file: which mapping of its pickle is the state dict, and of what its
// tensors are views. Rules and codes: docs/formats/torch.md.
#pragma once

#include <vector>

#include "formats/torch_pickle.h"
#include "formats/torch_storages.h"

namespace loadstone {

// In the pickle's order; with strides if a tensor is not contiguous. Throws Error
// "pt.global_refused", "pt.unsupported", "pt.view_bounds", "pt.overflow", "pt.duplicate",
// "pt.storage_missing", "pt.top_level", "pt.arguments", "pt.budget", "pt.utf8".
[[nodiscard]] std::vector<TensorInfo> read_state(const TorchFile& file, Warnings& warnings,
                                                 std::vector<Finding>& findings);

}  // namespace loadstone
