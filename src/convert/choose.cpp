#include "convert/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "codec/encode.h"
#include "convert/chooser.h"
#include "convert/experts.h"
#include "convert/json_text.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Shapes that an encoding cannot take, told once for all that are alike.
class Misfits {
 public:
  void add(const TargetRecipe& recipe, const Quantization& quantization,
           const DecodeProblem& problem) {
    auto& [count, first] = misfits_[{folded_name(recipe.target), recipe.shape.text(),
                                     quantization.encoding, problem.message}];
    if (++count == 1) first = recipe.target;
  }

  void report(std::vector<Finding>& findings) const {
    for (const auto& [key, value] : misfits_) {
      const auto& [folded, shape, encoding, message] = key;
      const auto& [count, first] = value;
      findings.push_back({.severity = Severity::warning,
                          .code = "convert.left_alone",
                          .target = first,
                          .message = fmt::format(
                              "'{}'{} {} stays as it is: {} cannot take it, {}", printable(first),
                              count > 1 ? fmt::format(" and {} like it", count - 1) : "", shape,
                              encoding, message),
                          .suggestion = "choose another encoding for it, or --exclude it"});
    }
  }

 private:
  std::map<std::tuple<std::string, std::string, std::string, std::string>,
           std::pair<std::size_t, std::string>>
      misfits_;
};

// Partners of one scale have one dtype, one encoding and as many matrices each; who has none has no
// group.
void part_groups(const Recipes& recipes, Choices& choices) {
  std::map<std::string, std::size_t, std::less<>> members;
  for (const TargetRecipe& recipe : recipes.targets) {
    const auto found = choices.quantize.find(recipe.target);
    if (found == choices.quantize.end() || found->second.group.empty()) continue;
    QuantizeForm form;
    static_cast<void>(prepare_quantization(found->second, recipe.shape, recipe.dtype, form));
    Quantization& quantization = found->second;
    // ModelOpt's export of FP8 leaves each its own scale, but for experts that it takes as one.
    const bool is_alone = form.dialect == QuantizeDialect::exported &&
                          recipe.target.find(".experts.") == std::string::npos;
    if (!form.needs_amax || is_alone) {
      quantization.group.clear();
      continue;
    }
    quantization.group = fmt::format("{}|{}|{}|{}", quantization.group, quantization.encoding,
                                     quantization.dialect, form.stack);
    ++members[quantization.group];
  }
  for (auto& [name, quantization] : choices.quantize) {
    if (!quantization.group.empty() && members[quantization.group] < 2) quantization.group.clear();
  }
}

}  // namespace

std::vector<std::string> names_of(const Recipes& recipes) {
  std::vector<std::string> names;
  names.reserve(recipes.targets.size());
  for (const TargetRecipe& recipe : recipes.targets) names.push_back(recipe.target);
  return names;
}

std::string folded_name(std::string_view name) {
  std::string folded;
  bool in_number = false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    // Only whole components: "w1" stays.
    const bool begins = i == 0 || name[i - 1] == '.';
    if (is_digit(name[i]) && (begins || in_number)) {
      if (!in_number) folded += '*';
      in_number = true;
      continue;
    }
    in_number = false;
    folded += name[i];
  }
  return folded;
}

Choices choose_quantized(const ConvertOptions& options, std::uint64_t cut_max, Recipes& recipes,
                         std::vector<Finding>& findings) {
  Choices choices;
  const std::string& config = options.folder.config;
  Chooser chooser(options.quantize, config);
  std::vector<std::string> names = names_of(recipes);
  // A stack is cut where its weights would be quantized.
  const std::size_t cut = split_stacks(
      recipes, string_member(config, "model_type"),
      [&](const TargetRecipe& recipe) { return !chooser.reason(recipe).has_value(); }, cut_max,
      findings);
  if (cut > 0 && options.experts == ExpertLayout::fused) {
    throw Error("plan.options",
                "experts that are quantized stand one by one in files: --exclude them, or leave "
                "--experts out",
                {.field = "experts", .found = "fused", .expected = "separate"});
  }
  Misfits misfits;
  for (const TargetRecipe& recipe : recipes.targets) {
    if (const auto why = chooser.reason(recipe)) {
      if (recipe.shape.rank() >= 2) choices.plain.emplace(recipe.target, *why);
      continue;
    }
    Chooser::Format* const format = chooser.encoding_for(recipe.target);
    if (format == nullptr) {
      choices.plain.emplace(recipe.target, "no format is for it");
      continue;
    }
    Quantization quantization = *format->quantization;
    QuantizeForm form;
    auto problem = prepare_quantization(quantization, recipe.shape, recipe.dtype, form);
    const std::uint64_t block = problem ? 1 : written_encoding(quantization).row_block;
    if (!problem && recipe.shape.extents().back() % block != 0) {
      problem = DecodeProblem{fmt::format("rows are no whole blocks of {}", block), {}, {}};
    }
    if (problem) {
      misfits.add(recipe, quantization, *problem);
      choices.plain.emplace(recipe.target, "its shape does not fit the encoding");
      continue;
    }
    ++format->made;
    quantization.group = chooser.group_of(recipe.target);
    choices.quantize.emplace(recipe.target, std::move(quantization));
  }
  part_groups(recipes, choices);
  misfits.report(findings);
  // Stacks that were cut are among the names, and made: their experts replace them.
  const std::vector<std::string> left = names_of(recipes);
  const std::set<std::string_view> present(left.begin(), left.end());
  names.insert(names.end(), left.begin(), left.end());
  const auto is_made = [&](const std::string& name) {
    return choices.quantize.contains(name) || !present.contains(name);
  };
  chooser.report(names, is_made, findings);
  return choices;
}

}  // namespace loadstone
