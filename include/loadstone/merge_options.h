// Options of merges: of models and adapters in a conversion, and of adapters in a load.
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
  slerp,            // a point on the arc between two models
  task_arithmetic,  // the first model, plus the sum of the other models' differences from it
  ties,             // only the largest elements of these differences, with the sign of the majority
  dare_linear,      // only a random part of these differences
  dare_ties,        // a random part of these differences, with the sign of the majority
};

// Returns "linear", "slerp", "task-arithmetic", "ties", "dare-linear" or "dare-ties".
[[nodiscard]] LOADSTONE_API std::string_view name(MergeMethod method) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<MergeMethod> parse_merge_method(
    std::string_view name) noexcept;

// Policy for a tied tensor if an adapter changes one of its names.
enum class TiePolicy : std::uint8_t {
  split,  // the other names keep the base's value in separate tensors, as after training
  keep,   // the other names change too
};

// Returns "split" or "keep".
[[nodiscard]] LOADSTONE_API std::string_view name(TiePolicy policy) noexcept;

// A low-rank adapter: LoRA, rsLoRA or DoRA with the tensor names of peft, diffusers or kohya.
// loadstone also reads the adapter_config.json in the adapter's folder.
struct MergeAdapter {
  float factor = 1;  // multiplies the update, in addition to the adapter's own scale
  // Patterns for tensors of the adapter to ignore (RE2 syntax, anywhere in the name), for example
  // the tensors for other models of a pipeline.
  std::vector<std::string> ignore{};
};

// Options for merging all checkpoints of a joined catalog: models first, then adapters. The output
// has the names, shapes and dtypes of the first model; quantized tensors are decoded. Tensors that
// are not floats of 16 bits or more are taken from the first model.
struct MergeOptions {
  // One weight per model. If the method uses the first model as its base, the first weight is 1.
  std::vector<float> weights{1};
  std::vector<MergeAdapter> adapters{};  // added in this order
  TiePolicy tie = TiePolicy::split;      // finding "merge.tie" names the ties that are split
  MergeMethod method = MergeMethod::linear;
  // Divide each element by the sum of its weights. nullopt: true for ties and dare-ties.
  std::optional<bool> normalise{};
  // loadstone rejects each of these options if the method does not use it.
  std::optional<float> scale{};         // factor of the sum of all differences; default 1
  std::optional<double> density{};      // ties, dare: fraction of a difference to keep; default 1
  std::optional<std::uint64_t> seed{};  // dare: seed of the random part; default 0
};

}  // namespace loadstone
