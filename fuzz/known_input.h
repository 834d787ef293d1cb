// Builds checkpoints of which the tests know every element.
#pragma once

#include <string>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/naive.h"
#include "support/memory_storage.h"

namespace loadstone::fuzz {

// A tensor of the checkpoint, and the `range` of elements that boxes index. For a view with
// strides, the range has all elements from the view's first one to its last one.
struct KnownSource {
  std::string name;
  NaiveTensor value;
  NaiveTensor range;
};

struct KnownCheckpoint {
  std::vector<std::string> paths;
  std::vector<KnownSource> sources;
  // Name of a two-dimensional FP8 weight whose F32 scales are in the tensor `weights + "_scales"`;
  // empty if there is no such weight.
  std::string weights;
};

// Writes one or two safetensors files, or torch files with views of any strides.
[[nodiscard]] KnownCheckpoint add_known_checkpoint(Input& input, test::MemoryStorage& storage);

// Returns a shape of few elements, which is rarely empty.
[[nodiscard]] std::vector<std::uint64_t> random_extents(Input& input, std::size_t rank_max);

}  // namespace loadstone::fuzz
