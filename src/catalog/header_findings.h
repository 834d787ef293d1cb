// The errors that headers alone show, without a model: `inspect` and `verify` report the same.
#pragma once

#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

// Quantized tensors that cannot be read, and experts that are not whole; of a few shards of many
// the latter is an info: the rest is elsewhere.
[[nodiscard]] std::vector<Finding> header_findings(const Catalog& catalog);

// The exit status of a command that reports findings: that of a bad file if one of them is an error
// of a format, else 1 if one is an error.
[[nodiscard]] int exit_status(const std::vector<Finding>& findings) noexcept;

}  // namespace loadstone
