// Several checkpoints made into one on their way: models that are put together in a conversion, and
// adapters that are merged into a base, in a load too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

// How models become one.
enum class MergeMethod : std::uint8_t {
  linear,           // the sum of all, each times its weight
  slerp,            // the arc between two
  task_arithmetic,  // the first, and the sum of what the others differ from it by
  ties,             // of these differences the largest, with the sign of most
  dare_linear,      // of these differences some at random
  dare_ties,        // the same, with the sign of most
};

// "linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"
[[nodiscard]] LOADSTONE_API std::string_view name(MergeMethod method) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<MergeMethod> parse_merge_method(
    std::string_view name) noexcept;

// The other names of a tied tensor when an adapter changes one of its names.
enum class TiePolicy : std::uint8_t {
  split,  // they keep the base's value, as tensors of their own: the result of training
  keep,   // they change with it
};

// "split", "keep"
[[nodiscard]] LOADSTONE_API std::string_view name(TiePolicy policy) noexcept;

// A low-rank adapter: LoRA, rsLoRA or DoRA in the names of peft, diffusers or kohya. Its
// adapter_config.json is read from its folder.
struct MergeAdapter {
  float factor = 1;  // of what the adapter adds, beside its own scale
  // Tensors of the adapter that are left out on purpose: regular expressions (RE2 syntax, anywhere
  // in the name), such as those of a pipeline's other models.
  std::vector<std::string> ignore{};
};

// How the checkpoints that a catalog joins become one, all of them: models first, then adapters.
// The output has the names, shapes and dtypes of the first model; what is quantized becomes
// numbers. Tensors that are no floats of 16 bits or more are the first model's.
struct MergeOptions {
  // One for each model. Of methods that take the first model for their base its weight is 1.
  std::vector<float> weights{1};
  std::vector<MergeAdapter> adapters{};  // in the order in which they are added
  TiePolicy tie = TiePolicy::split;      // finding "merge.tie" names the ties that are split
  MergeMethod method = MergeMethod::linear;
  // Divides by the weights that went into an element. None: ties and dare-ties do.
  std::optional<bool> normalise{};
  // Each is refused where the method does not use it.
  std::optional<float> scale{};         // of all differences together; 1 without it
  std::optional<double> density{};      // ties, dare: the share of a difference that is kept; 1
  std::optional<std::uint64_t> seed{};  // dare; 0
};

}  // namespace loadstone
