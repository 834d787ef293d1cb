// Makes the values of an output before rules rename them: decoded tensors, experts in a different
// layout, merged models, and codes that are kept.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

struct Values {
  Recipes recipes{};  // recipes of decoded, fused, separated, merged or repacked tensors
  std::vector<std::uint32_t> dropped{};  // sources that are deliberately unused
  std::vector<RepackedTensor> repacked{};
  bool unties = false;  // the output has two values for names that the source's config ties
};

// Returns true if rules or recipes determine the names of the output.
[[nodiscard]] bool names_are_given(const ConvertOptions& options) noexcept;

// Returns true if quantized tensors are decoded: if the options request it, or if tensors are to be
// quantized and no rules or recipes rename them.
[[nodiscard]] bool decodes(const Catalog& catalog, const ConvertOptions& options);

// Decodes tensors and changes the layout of experts, as `is_decoded` and `options.experts` request.
// `broken`: the result of check_expert_series().
[[nodiscard]] Values decoded_values(const std::shared_ptr<const Catalog>& catalog,
                                    const ConvertOptions& options, bool is_decoded,
                                    const std::set<std::string, std::less<>>& broken,
                                    std::vector<Finding>& findings);

// Returns true for F16, BF16, F32 and F64.
[[nodiscard]] constexpr bool is_wide_float(Dtype dtype) noexcept {
  return kind(dtype) == DtypeKind::floating && bits(dtype) >= 16;
}

}  // namespace loadstone
