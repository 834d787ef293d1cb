// The choice of the tensors that are quantized, by the caller's patterns and quantize_rules.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/quantization.h"
#include "loadstone/recipe.h"

namespace loadstone {

struct Choices {
  std::map<std::string, Quantization, std::less<>> quantize;
  // Why the others stay as they are: those that are weights of more than one dim.
  std::map<std::string, std::string_view, std::less<>> plain;
  // Targets that become numbers although a file could hold their blocks.
  std::set<std::string, std::less<>> numbers;
  // Targets that have the type that was asked for.
  std::set<std::string, std::less<>> kept;
};

// Cuts stacks of experts that are to be quantized into the weights of single experts, which is how
// servers' formats hold them, and chooses. Throws Error "plan.options" for a pattern that is no
// regular expression, for formats that do not go together, and for stacks that are to stay whole.
// `cut_max`: how many tensors stacks may become.
[[nodiscard]] Choices choose_quantized(const ConvertOptions& options, std::uint64_t cut_max,
                                       Recipes& recipes, std::vector<Finding>& findings);

// The targets' names, in their order.
[[nodiscard]] std::vector<std::string> names_of(const Recipes& recipes);

// Tensors that are alike, which one finding reports.
struct Alike {
  std::size_t count = 0;
  std::string first;

  void add(const std::string& name) {
    if (count++ == 0) first = name;
  }
  // "'a.0.b' and 3 like it"
  [[nodiscard]] std::string text() const;
};

// Names with * for numbers: what is alike has one.
[[nodiscard]] std::string folded_name(std::string_view name);

}  // namespace loadstone
