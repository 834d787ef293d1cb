// Finds the files that a path refers to. docs/formats/sharded-index.md describes the rules.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

// Names of the index that libraries look for.
inline constexpr std::array<std::string_view, 2> usual_indexes = {
    "model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"};
// Names of the single file that libraries look for.
inline constexpr std::array<std::string_view, 2> usual_files = {
    "model.safetensors", "diffusion_pytorch_model.safetensors"};

struct CheckpointFiles {
  std::string root;                // the folder that all paths below are relative to
  std::vector<std::string> files;  // in order; empty if the index determines them
  std::optional<std::string> index;
  std::vector<std::string> ignored;  // other weights of the folder; may include the index's shards
  std::vector<std::string> preferred;  // files that transformers or diffusers reads instead
  // True if the files should be a complete set of one folder, so that a gap in their numbers is an
  // error.
  bool numbered_set = false;
};

// `path`: a file, a folder, an index, or a pattern. Throws Error "io.not_found",
// "format.no_checkpoint", "ix.not_regular".
[[nodiscard]] CheckpointFiles locate_checkpoint(Storage& storage, const std::string& path);

// Adds the finding for weights in the folder that are not part of the checkpoint: a warning if
// transformers or diffusers reads them instead, else an info. `shards`: the shards of the index.
void report_ignored(CheckpointFiles files, const std::vector<std::string>& shards,
                    std::vector<Finding>& findings);

// Returns exactly these files, relative to the folder that they share.
[[nodiscard]] CheckpointFiles as_checkpoint_files(Storage& storage, std::vector<std::string> paths);

}  // namespace loadstone
