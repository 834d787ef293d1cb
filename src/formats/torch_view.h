// Reads one tensor of a torch file from the call in the pickle that would make it.
#pragma once

#include <cstdint>
#include <string_view>

#include "formats/torch_pickle.h"
#include "formats/torch_storages.h"
#include "loadstone/catalog.h"

namespace loadstone {

// `node`: the call of a tensor maker. Throws Error "pt.unsupported", "pt.arguments",
// "pt.global_refused", "pt.view_bounds", "pt.overflow", "pt.storage_missing", "pt.storage_type",
// "pt.budget".
[[nodiscard]] TensorInfo read_torch_view(const TorchFile& file, CopyBudget& budget,
                                         std::uint32_t node, std::string_view name);

}  // namespace loadstone
