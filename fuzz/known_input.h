// Checkpoints whose every element is known.
#pragma once

#include <string>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/naive.h"
#include "support/memory_storage.h"

namespace loadstone::fuzz {

// A tensor of the checkpoint. `range`: the extent that boxes index; for a view with strides, all
// elements from its first to its last.
struct KnownSource {
  std::string name;
  NaiveTensor value;
  NaiveTensor range;
};

struct KnownCheckpoint {
  std::vector<std::string> paths;
  std::vector<KnownSource> sources;
  // FP8 weights of two dimensions, with F32 scales under the same name and "_scales" that divide
  // them into blocks; empty without such weights.
  std::string weights;
};

// Writes one or two safetensors files, or torch files with views of any strides.
[[nodiscard]] KnownCheckpoint add_known_checkpoint(Input& input, test::MemoryStorage& storage);

// A shape of few elements, rarely an empty one.
[[nodiscard]] std::vector<std::uint64_t> random_extents(Input& input, std::size_t rank_max);

}  // namespace loadstone::fuzz
