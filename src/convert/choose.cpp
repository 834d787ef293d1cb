#include "convert/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/pattern.h"
#include "base/text.h"
#include "codec/encode.h"
#include "convert/experts.h"
#include "convert/json_text.h"
#include "convert/quantize_rules.h"
#include "loadstone/error.h"
#include "plan/rules.h"

namespace loadstone {

namespace {

constexpr std::size_t patterns_max = 10'000;
constexpr std::string_view none = "none";

Pattern compile(std::string_view text, const char* field, std::int64_t memory_max) {
  return compile_pattern(text, "plan.options", field, memory_max);
}

bool is_wide(Dtype dtype) noexcept {
  return dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16;
}

// One format with its pattern ready. The default's is null.
struct Format {
  Pattern pattern;
  const Quantization* quantization;
  std::size_t tensors = 0;
};

// Not thread-safe.
class Chooser {
 public:
  Chooser(const QuantizeOptions& options, std::string_view config) {
    const std::size_t given =
        options.formats.size() + options.include.size() + options.exclude.size();
    if (given > patterns_max) {
      throw Error("plan.options", "too many patterns",
                  {.field = "exclude",
                   .found = std::to_string(given),
                   .expected = "at most " + std::to_string(patterns_max)});
    }
    const std::int64_t memory = pattern_memory(given);
    const std::int64_t own = pattern_memory(1);
    layer_ = compile(layer_pattern, "layers", own);
    weight_ = compile(weight_pattern, "weights", own);
    const std::string model_type = string_member(config, "model_type");
    layers_ = number_member(config, "num_hidden_layers");
    layer_number_ = compile(R"((?:^|\.)layers\.(\d+)\.)", "layers", own);
    for (const QuantizeFormat& format : options.formats) {
      Pattern pattern;
      if (!format.pattern.empty()) pattern = compile(format.pattern, "quantize", memory);
      formats_.push_back({std::move(pattern), &format.quantization});
    }
    for (const auto& text : options.include) include_.push_back(compile(text, "include", memory));
    for (const auto& text : options.exclude) exclude_.push_back(compile(text, "exclude", memory));
    for (const PlainRule& rule : plain_rules()) {
      if (!rule.model_types.empty()) {
        const auto types = compile(rule.model_types, "model_type", own);
        if (!re2::RE2::FullMatch(model_type, *types)) continue;
      }
      plain_.emplace_back(compile(rule.pattern, "rules", own), rule.reason);
    }
    for (const PartnerRule& rule : partner_rules()) {
      partners_.push_back(compile(rule.pattern, "rules", own));
    }
  }

  // Why the tensor stays as it is; nothing where it is quantized.
  [[nodiscard]] std::optional<std::string_view> reason(const TargetRecipe& recipe) const {
    if (recipe.shape.rank() < 2) return "no matrix";
    if (recipe.constant != nullptr) return "constant";
    if (!is_wide(recipe.dtype)) return "its numbers are no F32, F16 or BF16";
    const std::string& name = recipe.target;
    const auto found = [&](const Pattern& pattern) { return is_in(*pattern, name); };
    if (std::ranges::any_of(exclude_, found)) return "excluded";
    if (std::ranges::any_of(include_, found)) return std::nullopt;
    for (const auto& [pattern, why] : plain_) {
      if (is_in(*pattern, name)) return why;
    }
    if (!is_in(*weight_, name)) return "no weight of a linear layer";
    if (!is_in(*layer_, name)) return "outside the decoder layers";
    if (is_beyond(name)) return "layer of the multi-token prediction";
    if (recipe.shape.rank() > 3) return "more than three dims";
    return std::nullopt;
  }

  // Null: it stays as it is.
  [[nodiscard]] const Quantization* format_of(const std::string& name) {
    for (Format& format : formats_) {
      if (format.pattern != nullptr && !is_in(*format.pattern, name)) continue;
      ++format.tensors;
      return format.quantization->encoding == none ? nullptr : format.quantization;
    }
    return nullptr;
  }

  [[nodiscard]] std::string group_of(const std::string& name) const {
    for (std::size_t i = 0; i < partners_.size(); ++i) {
      std::string prefix;
      if (re2::RE2::FullMatch(name, *partners_[i], &prefix)) {
        return fmt::format("{}:{}", i, prefix);
      }
    }
    return {};
  }

  [[nodiscard]] const std::vector<Format>& formats() const noexcept { return formats_; }

 private:
  // Layers behind the last one of the model are those of the multi-token prediction.
  [[nodiscard]] bool is_beyond(const std::string& name) const {
    std::uint64_t number = 0;
    return layers_ && re2::RE2::PartialMatch(name, *layer_number_, &number) && number >= *layers_;
  }

  Pattern layer_;
  Pattern weight_;
  Pattern layer_number_;
  std::optional<std::uint64_t> layers_;
  std::vector<Format> formats_;
  std::vector<Pattern> include_;
  std::vector<Pattern> exclude_;
  std::vector<std::pair<Pattern, std::string_view>> plain_;
  std::vector<Pattern> partners_;
};

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

void report_idle(const std::vector<Format>& formats, std::vector<Finding>& findings) {
  for (const Format& format : formats) {
    if (format.tensors > 0) continue;
    findings.push_back(
        {.severity = Severity::warning,
         .code = "convert.left_alone",
         .message = format.pattern == nullptr
                        ? fmt::format("nothing is left to become {}", format.quantization->encoding)
                        : fmt::format("'{}' finds nothing that may be quantized",
                                      printable(format.pattern->pattern())),
         .suggestion = "--include adds tensors to those that are chosen"});
  }
}

}  // namespace

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

Choices choose_quantized(const QuantizeOptions& options, std::string_view config,
                         std::uint64_t cut_max, Recipes& recipes, std::vector<Finding>& findings) {
  Choices choices;
  Chooser chooser(options, config);
  // A stack is cut where its weights would be quantized.
  split_stacks(
      recipes, string_member(config, "model_type"),
      [&](const TargetRecipe& recipe) { return !chooser.reason(recipe).has_value(); }, cut_max,
      findings);
  Misfits misfits;
  for (const TargetRecipe& recipe : recipes.targets) {
    if (const auto why = chooser.reason(recipe)) {
      if (recipe.shape.rank() >= 2) choices.plain.emplace(recipe.target, *why);
      continue;
    }
    const Quantization* const format = chooser.format_of(recipe.target);
    if (format == nullptr) {
      choices.plain.emplace(recipe.target, "no format is for it");
      continue;
    }
    Quantization quantization = *format;
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
    quantization.group = chooser.group_of(recipe.target);
    choices.quantize.emplace(recipe.target, std::move(quantization));
  }
  part_groups(recipes, choices);
  misfits.report(findings);
  report_idle(chooser.formats(), findings);
  return choices;
}

}  // namespace loadstone
