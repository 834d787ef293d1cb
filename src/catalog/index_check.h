// Checks that an index and its shards agree.
#pragma once

#include <string>
#include <vector>

#include "formats/sharded_index.h"
#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

// Returns the shards that an index names, each once, in natural order.
[[nodiscard]] std::vector<std::string> shard_names(const ShardedIndex& index);

// Removes tensors of a name that the index maps to another shard. Throws Error "ix.tensor_missing";
// adds findings "ix.replaced", "ix.unlisted", "ix.total_size".
void check_index(const std::string& index_path, const ShardedIndex& index,
                 const std::vector<Shard>& shards, std::vector<TensorInfo>& tensors,
                 std::vector<Finding>& findings);

// Returns the names of the parts that a numbered set of files lacks, such as
// "model-00002-of-00003.safetensors".
[[nodiscard]] std::vector<std::string> missing_parts(const std::vector<std::string>& names);

// Returns text such as "no file 'a'" or "no files 'a', 'b'", with at most a thousand names.
[[nodiscard]] std::string no_files_text(const std::vector<std::string>& missing);

// Adds finding "ix.gap" for missing_parts().
void warn_about_gaps(const std::string& path, const std::vector<std::string>& names,
                     std::vector<Finding>& findings);

}  // namespace loadstone
