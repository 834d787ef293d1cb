// Joins the metadata of several files of one checkpoint.
#pragma once

#include <string>
#include <vector>

#include "loadstone/catalog.h"

namespace loadstone {

// Adds the metadata of the file at `path`. Joins markers of quantized layers; for other keys the
// first file's value stays. Returns the keys with a different value in this file. Throws Error
// "q.config" if two files mark a layer differently, "gg.duplicate" for two shapes of a tensor,
// "format.adapter" for two configurations of adapters.
[[nodiscard]] std::vector<std::string> join_metadata(Metadata& all, Metadata more,
                                                     const std::string& path);

// Removes the metadata of a later part of a split GGUF, except the shapes of its tensors, because
// the metadata of the first part counts. Returns the removed keys that the first part lacks, or has
// with a different value.
[[nodiscard]] std::vector<std::string> drop_later_metadata(const Metadata& first, Metadata& later);

}  // namespace loadstone
