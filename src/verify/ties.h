// Two values for one tensor: an embedding and a head that the config next to a checkpoint ties.
#pragma once

#include <cstdint>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

// Errors "plan.shape" for two shapes, warnings "plan.tie" for two values. Null: the catalog's own
// storage. Adds the bytes read to `bytes_read`.
[[nodiscard]] std::vector<Finding> check_ties(const Catalog& catalog, Storage* storage,
                                              std::uint64_t& bytes_read);

}  // namespace loadstone
