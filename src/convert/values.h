// The values of an output before rules give them names: numbers that are stored
// quantized, experts that are stored one by one or all in one tensor, models that become one, and
// codes that stay as they are.
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
  Recipes recipes{};                     // of decoded, fused, separated, merged or repacked tensors
  std::vector<std::uint32_t> dropped{};  // sources that are left out on purpose
  std::vector<RepackedTensor> repacked{};  // whose components the recipes are
  bool unties = false;  // the output holds two values for names that the source's config ties
};

// Returns true if rules or recipes name the tensors of the output.
[[nodiscard]] bool names_are_given(const ConvertOptions& options) noexcept;

// Whether quantized tensors become numbers: because the options say so, or because tensors are
// quantized by names as they are in the file.
[[nodiscard]] bool decodes(const Catalog& catalog, const ConvertOptions& options);

// Whether codes that the files' blocks hold stay codes, in blocks: their recipes are those of their
// numbers until it is known what becomes of them.
[[nodiscard]] bool keeps_codes(const ConvertOptions& options, bool is_decoded) noexcept;

// As `is_decoded` and `options.experts` ask for. `broken`: what check_expert_series() found.
[[nodiscard]] Values decoded_values(const std::shared_ptr<const Catalog>& catalog,
                                    const ConvertOptions& options, bool is_decoded,
                                    const std::set<std::string, std::less<>>& broken,
                                    std::vector<Finding>& findings);

// Returns true for F16, BF16, F32 and F64.
[[nodiscard]] constexpr bool is_wide_float(Dtype dtype) noexcept {
  return kind(dtype) == DtypeKind::floating && bits(dtype) >= 16;
}

}  // namespace loadstone
