// model.safetensors.index.json: which shard holds which tensor.
// Rules and codes: docs/formats/sharded-index.md.
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

// "model.safetensors.index.json", and the spelling of variants,
// "model.safetensors.index.fp16.json".
[[nodiscard]] bool is_index_name(std::string_view file_name) noexcept;

// "pytorch_model.bin.index.json", and variants of it: the same for torch's files.
[[nodiscard]] bool is_torch_index_name(std::string_view file_name) noexcept;

// Throws Error "ix.json", "ix.weight_map", "ix.duplicate", "ix.path", "ix.path_escape", "io.*".
[[nodiscard]] ShardedIndex read_sharded_index(ByteSource& source);

// Requires one relative path below the folder of the index, in a spelling that all systems read the
// same way. Throws Error "ix.path", "ix.path_escape" with the known facts about the place.
void check_shard_name(const std::string& path, std::string_view shard, std::string_view field,
                      std::string_view culprit, std::optional<std::uint64_t> byte_offset = {});

// A shard's name without "." and empty parts, which would make two names of one file.
[[nodiscard]] std::string plain_relative_path(std::string_view path);

// The number and count in "model-00002-of-00005".
struct PartName {
  std::string stem;  // "model"
  std::uint64_t number = 0;
  std::uint64_t count = 0;
  int digits = 5;
};
[[nodiscard]] std::optional<PartName> parse_part_name(std::string_view name_without_extension);

}  // namespace loadstone
