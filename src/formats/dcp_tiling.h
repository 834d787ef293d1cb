// Whether the chunks of a tensor are the tensor.
#pragma once

#include <string>

#include "formats/dcp_metadata.h"

namespace loadstone {

// The chunks lie inside the tensor. Throws Error "dcp.overlap", "dcp.hole", "dcp.unsupported".
void check_dcp_chunks(const std::string& path, const DcpTensor& tensor);

}  // namespace loadstone
