// Finds the errors that headers show without a model, for `inspect` and `verify`.
#pragma once

#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

// Returns findings about quantized tensors that cannot be decoded, and about incomplete experts. If
// the catalog has only a few of many shards, the latter are infos, because other shards may contain
// the missing tensors.
[[nodiscard]] std::vector<Finding> header_findings(const Catalog& catalog);

// Returns the exit status of a command that reports these findings: the highest status of an
// error's code, or 0 without errors.
[[nodiscard]] int exit_status(const std::vector<Finding>& findings) noexcept;

}  // namespace loadstone
