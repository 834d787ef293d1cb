// What is wrong with the values of a tensor, as a finding.
#pragma once

#include <string>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

[[nodiscard]] Finding finding_of(const Catalog& catalog, const TensorInfo& tensor, std::string code,
                                 std::string found, std::string expected);

}  // namespace loadstone
