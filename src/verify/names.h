// Recognises two checkpoints that name the same tensors differently.
#pragma once

#include <cstddef>
#include <optional>

#include "loadstone/finding.h"
#include "loadstone/verify.h"

namespace loadstone {

// Returns a warning if most names are missing and the unexpected names differ from them only by a
// prefix. The warning replaces these differences in the report. `count`: number of expected names.
[[nodiscard]] std::optional<Finding> prefix_differs(std::size_t count, VerifyReport& report);
// Returns the same warning, or else one if most names are missing and there are unexpected names.
[[nodiscard]] std::optional<Finding> names_differ(std::size_t count, VerifyReport& report);

}  // namespace loadstone
