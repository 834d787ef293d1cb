// Finds the tensors of a torch file: which mapping of its pickle is the state dict, and which
// storage each tensor is a view of. Rules and error codes: docs/formats/torch.md.
#pragma once

#include <vector>

#include "formats/torch_pickle.h"
#include "formats/torch_storages.h"

namespace loadstone {

// Returns the tensors in the pickle's order, with strides if they are not contiguous. Throws Error
// "pt.global_refused", "pt.unsupported", "pt.view_bounds", "pt.overflow", "pt.duplicate",
// "pt.storage_missing", "pt.top_level", "pt.arguments", "pt.budget", "pt.utf8".
[[nodiscard]] std::vector<TensorInfo> read_state(const TorchFile& file, Warnings& warnings,
                                                 std::vector<Finding>& findings);

}  // namespace loadstone
