// Compares what a config declares about quantization and ties with the checkpoint's tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

// Returns warnings "q.config" if a library's config.json does not mention the quantized tensors, or
// declares an encoding although all tensors are plain floats. If `storage` is null, uses the
// catalog's storage.
[[nodiscard]] std::vector<Finding> check_claim(const Catalog& catalog, Storage* storage);

// Checks an embedding and a head that the config ties but the checkpoint stores separately. Returns
// errors "plan.shape" for different shapes, and warnings "plan.tie" for different values. If
// `storage` is null, uses the catalog's storage. Adds the number of bytes read to `bytes_read`.
[[nodiscard]] std::vector<Finding> check_ties(const Catalog& catalog, Storage* storage,
                                              std::atomic<bool>& stop, std::uint64_t& bytes_read);

}  // namespace loadstone
