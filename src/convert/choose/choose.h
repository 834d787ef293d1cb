// Chooses the tensors to quantize, by the caller's patterns and quantize_rules.h.
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
  // The reason why each remaining weight of two or more dims stays unchanged.
  std::map<std::string, std::string_view, std::less<>> plain;
  // Targets that are decoded although a file could store their blocks.
  std::set<std::string, std::less<>> numbers;
  // Targets that already have the requested type.
  std::set<std::string, std::less<>> kept;
};

// Chooses the tensors to quantize. First cuts stacks of experts that would be quantized into the
// weights of single experts, which servers expect. Throws Error "plan.options" for an invalid
// regular expression, for formats that exclude each other, and for stacks that must stay whole.
// `cut_max`: the maximum number of tensors after cutting.
[[nodiscard]] Choices choose_quantized(const ConvertOptions& options, std::uint64_t cut_max,
                                       Recipes& recipes, std::vector<Finding>& findings);

// Reports tensors that libraries would misread in the style to which codes are re-packed.
void report_repacked(const ConvertOptions& options, const std::vector<RepackedTensor>& repacked,
                     const Recipes& recipes, std::vector<Finding>& findings);

// Returns the targets' names, in their order.
[[nodiscard]] std::vector<std::string> names_of(const Recipes& recipes);

// Similar tensors that share one finding.
struct Alike {
  std::size_t count = 0;
  std::string first;

  void add(const std::string& name) {
    if (count++ == 0) first = name;
  }
  // Returns a string such as "'a.0.b' and 3 like it".
  [[nodiscard]] std::string text() const;
};

// Replaces numbers in a name by *, so that similar names become equal. Appends the numbers to
// `numbers`, which may be null.
[[nodiscard]] std::string folded_name(std::string_view name,
                                      std::vector<std::uint64_t>* numbers = nullptr);
// Returns names, with one folded name and a count for similar names: "'a.weight', 'b.*.weight' (12)
// and 3 more".
[[nodiscard]] std::string folded_list(const std::vector<std::string>& names);

}  // namespace loadstone
