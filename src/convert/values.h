// What the tensors of an output are made of, before rules give them names: numbers that are stored
// quantized, experts that are stored one by one or all in one tensor, models that become one, and
// codes that stay as they are.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "boxes/decodings.h"
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

// Names of a catalog's tensors.
[[nodiscard]] std::vector<std::string> tensor_names(const Catalog& catalog,
                                                    const std::vector<std::uint32_t>& tensors);

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

// Of all tensors of joined checkpoints that are merged or decoded; the others of the first stay as
// they are. Throws Error "plan.options" for options that do not go with the catalog.
[[nodiscard]] Values merged_values(const std::shared_ptr<const Catalog>& catalog,
                                   const ConvertOptions& options, std::vector<Finding>& findings);

// Whether quantized tensors get the components of another style, and no number changes: a style is
// named, and nothing is to be quantized.
[[nodiscard]] bool repacks(const ConvertOptions& options) noexcept;
// The components that the style has for each quantized tensor, and for blocks of codes that it
// holds as well. Errors "convert.lossy" name those that cannot be had without changing a number.
// Throws Error "plan.options" where there is nothing to repack.
[[nodiscard]] Values repacked_values(const std::shared_ptr<const Catalog>& catalog,
                                     QuantizeStyle style, std::vector<Finding>& findings);
// The number that scales are to be divided by in place of being multiplied with `factor`, where
// each scale in F8_E4M3 then comes to the same F32; and the reverse. Nothing: there is none.
[[nodiscard]] std::optional<float> same_divisor(float factor) noexcept;
[[nodiscard]] std::optional<float> same_factor(float divisor) noexcept;

// Returns true for F16, BF16, F32 and F64.
[[nodiscard]] constexpr bool is_wide_float(Dtype dtype) noexcept {
  return kind(dtype) == DtypeKind::floating && bits(dtype) >= 16;
}

// Returns whether the recipe copies from FP8 tensors alone to which no scale belongs, so that their
// codes are numbers as they are, and keeps their dtype.
[[nodiscard]] bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe);
// Recipes of such tensors make BF16, which holds their numbers, so that they can be quantized.
void widen_plain_fp8(const Catalog& catalog, Recipes& recipes);
// Recipes that were not chosen get their own dtype again.
struct Choices;
void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes);
// Returns whether there are integers or FP8 that could be codes of an unknown layout.
[[nodiscard]] bool may_hold_codes(const Catalog& catalog);

}  // namespace loadstone
