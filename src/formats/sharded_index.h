// Reads model.safetensors.index.json, which names the shard of each tensor.
// Rules and error codes: docs/formats/sharded-index.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

struct IndexEntry {
  std::string tensor;
  std::string shard;  // as the index spells it; checked to stay below the index's folder
};

struct ShardedIndex {
  std::vector<IndexEntry> entries;  // in the file's order; never empty
  // Text of metadata.total_size, if present.
  std::optional<std::string> total_size;
};

// Returns true for "model.safetensors.index.json" and names of variants, such as
// "model.safetensors.index.fp16.json".
[[nodiscard]] bool is_index_name(std::string_view file_name) noexcept;

// Returns true for "pytorch_model.bin.index.json", the index of torch files, and its variants.
[[nodiscard]] bool is_torch_index_name(std::string_view file_name) noexcept;

// Throws Error "ix.json", "ix.weight_map", "ix.duplicate", "ix.path", "ix.path_escape", "io.*".
[[nodiscard]] ShardedIndex read_sharded_index(ByteSource& source);

// Checks that a shard's name is a relative path below the folder of the index, in a spelling that
// all operating systems read the same way. Throws Error "ix.path", "ix.path_escape"; the other
// arguments go into the Error.
void check_shard_name(const std::string& path, std::string_view shard, std::string_view field,
                      std::string_view culprit, std::optional<std::uint64_t> byte_offset = {});

// Returns the path without "." and empty parts, so that each file has only one name.
[[nodiscard]] std::string plain_relative_path(std::string_view path);

// The parts of a name such as "model-00002-of-00005".
struct PartName {
  std::string stem;  // "model"
  std::uint64_t number = 0;
  std::uint64_t count = 0;
  int digits = 5;
};
[[nodiscard]] std::optional<PartName> parse_part_name(std::string_view name_without_extension);

}  // namespace loadstone
