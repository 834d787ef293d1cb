// Checks that the chunks of a tensor cover it.
#pragma once

#include <string>

#include "formats/dcp_metadata.h"

namespace loadstone {

// Precondition: the chunks are inside the tensor. Throws Error "dcp.overlap", "dcp.hole",
// "dcp.unsupported".
void check_dcp_chunks(const std::string& path, const DcpTensor& tensor);

}  // namespace loadstone
