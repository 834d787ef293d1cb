// Compares the config's statements about quantization and ties with the checkpoint's tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

// Returns warnings "q.config": a library's config.json does not mention quantized tensors, or
// declares an encoding although all tensors are plain floats. `storage`: null: the catalog's.
[[nodiscard]] std::vector<Finding> check_claim(const Catalog& catalog, Storage* storage);

// Two values for an embedding and a head that the config ties: errors "plan.shape" for two shapes,
// warnings "plan.tie" for two values. Null: the catalog's own storage. Adds the bytes read to
// `bytes_read`.
[[nodiscard]] std::vector<Finding> check_ties(const Catalog& catalog, Storage* storage,
                                              std::atomic<bool>& stop, std::uint64_t& bytes_read);

}  // namespace loadstone
