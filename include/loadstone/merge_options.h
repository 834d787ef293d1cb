// Merges of checkpoints: models in a conversion, and adapters into a base, in a load too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

// Methods that combine models.
enum class MergeMethod : std::uint8_t {
  linear,           // the weighted sum
  slerp,            // the arc between two
  task_arithmetic,  // the first, plus the sum of the others' differences from it
  ties,             // the largest of these differences, with the sign of the majority
  dare_linear,      // a random part of these differences
  dare_ties,        // the same, with the sign of the majority
};

// "linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"
[[nodiscard]] LOADSTONE_API std::string_view name(MergeMethod method) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<MergeMethod> parse_merge_method(
    std::string_view name) noexcept;

// For the other names of a tied tensor if an adapter changes one of its names.
enum class TiePolicy : std::uint8_t {
  split,  // they keep the base's value in separate tensors, as after training
  keep,   // they change too
};

// "split", "keep"
[[nodiscard]] LOADSTONE_API std::string_view name(TiePolicy policy) noexcept;

// A low-rank adapter: LoRA, rsLoRA or DoRA with the names of peft, diffusers or kohya. loadstone
// reads adapter_config.json in its folder.
struct MergeAdapter {
  float factor = 1;  // multiplies the update, in addition to the adapter's own scale
  // Tensors of the adapter to ignore: regular expressions (RE2 syntax, anywhere in the name), for
  // example those of a pipeline's other models.
  std::vector<std::string> ignore{};
};

// Merges all checkpoints of a joined catalog: models first, then adapters. The output has the
// names, shapes and dtypes of the first model; quantized tensors are decoded. Tensors that are not
// floats of 16 bits or more are taken from the first model.
struct MergeOptions {
  // One per model. If the method uses the first model as its base, that weight is 1.
  std::vector<float> weights{1};
  std::vector<MergeAdapter> adapters{};  // added in this order
  TiePolicy tie = TiePolicy::split;      // finding "merge.tie" names the split ties
  MergeMethod method = MergeMethod::linear;
  // Divide by the sum of the weights of an element. nullopt: true for ties and dare-ties.
  std::optional<bool> normalise{};
  // Rejected if the method does not use them.
  std::optional<float> scale{};         // of the sum of all differences; default 1
  std::optional<double> density{};      // ties, dare: fraction of a difference to keep; default 1
  std::optional<std::uint64_t> seed{};  // dare; default 0
};

}  // namespace loadstone
