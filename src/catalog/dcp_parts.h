// Safetensors files that torch.distributed.checkpoint wrote, one for each rank.
#pragma once

#include <string>
#include <vector>

#include "formats/file_header.h"

namespace loadstone {

// A file's metadata about its own tensors, as JSON.
inline constexpr const char* dcp_sharding_key = "DCP_SHARDING_INFO";

// Throws Error "dcp.unsupported" where a tensor of the file is a part of a larger one, as
// HuggingFaceStorageWriter leaves them for a later step to join. Of whole tensors nothing is said.
void require_no_dcp_part(const FileHeader& header);

// Throws the same where names of a folder are those of ranks that saved without coordination: each
// has metadata of its own part, "__0.metadata", and nothing says what the whole is.
void require_common_dcp_metadata(const std::string& folder, const std::vector<std::string>& names);

}  // namespace loadstone
