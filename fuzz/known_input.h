// Checkpoints whose every element is known.
#pragma once

#include <string>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/naive.h"
#include "support/memory_storage.h"

namespace loadstone::fuzz {

// A tensor of the checkpoint. `range` is what boxes count in: of a view with strides, all elements
// from its first to its last.
struct KnownSource {
  std::string name;
  NaiveTensor value;
  NaiveTensor range;
};

struct KnownCheckpoint {
  std::vector<std::string> paths;
  std::vector<KnownSource> sources;
  // FP8 weights of two dimensions, with F32 scales under the same name and "_scales" that divide
  // them into blocks; empty: there are none.
  std::string weights;
};

// One or two files of safetensors, or of torch with views that have any strides.
[[nodiscard]] KnownCheckpoint add_known_checkpoint(Input& input, test::MemoryStorage& storage);

// A shape of few elements; seldom one without any.
[[nodiscard]] std::vector<std::uint64_t> random_extents(Input& input, std::size_t rank_max);

}  // namespace loadstone::fuzz
