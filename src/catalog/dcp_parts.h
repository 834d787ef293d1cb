// Rejects safetensors files in which torch.distributed.checkpoint stored one rank's parts of
// tensors.
#pragma once

#include <string>
#include <vector>

#include "formats/file_header.h"

namespace loadstone {

// Key of a file's JSON metadata about its tensors.
inline constexpr const char* dcp_sharding_key = "DCP_SHARDING_INFO";

// Throws Error "dcp.unsupported" if a tensor of the file is a part of a larger one, as written by
// HuggingFaceStorageWriter before consolidation.
void require_no_dcp_part(const FileHeader& header);

// Throws Error "dcp.unsupported" if the ranks saved to the folder without coordination: each has
// metadata of its part, such as "__0.metadata", and no metadata describes the whole checkpoint.
void require_common_dcp_metadata(const std::string& folder, const std::vector<std::string>& names);

}  // namespace loadstone
