#include "convert/choose/chooser.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "convert/choose/nearest_names.h"
#include "convert/choose/quantize_rules.h"
#include "convert/json_text.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::size_t patterns_max = 10'000;
constexpr std::string_view no_weight = "not the weight of a linear layer";

Pattern compile_rule(std::string_view text, const char* field, std::int64_t memory_max) {
  return compile_pattern(text, "plan.options", field, memory_max);
}

bool is_encodable(Dtype dtype) noexcept {
  return dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16;
}

bool finds_any(const std::vector<Pattern>& patterns, const std::string& name) {
  return std::ranges::any_of(patterns,
                             [&](const Pattern& pattern) { return is_in(*pattern, name); });
}

}  // namespace

Chooser::Chooser(const QuantizeOptions& options, std::string_view config) {
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
  layer_ = compile_rule(layer_pattern, "layers", own);
  weight_ = compile_rule(weight_pattern, "weights", own);
  const std::string model_type = string_member(config, "model_type");
  layers_ = value_at<std::uint64_t>(config, "/num_hidden_layers");
  layer_number_ = compile_rule(R"((?:^|\.)layers\.(\d+)\.)", "layers", own);
  for (const QuantizeFormat& format : options.formats) {
    Pattern pattern;
    if (!format.pattern.empty()) pattern = compile_rule(format.pattern, "quantize", memory);
    formats_.push_back({std::move(pattern), &format.quantization});
  }
  for (const auto& text : options.include)
    include_.push_back(compile_rule(text, "include", memory));
  for (const auto& text : options.exclude)
    exclude_.push_back(compile_rule(text, "exclude", memory));
  for (const PlainRule& rule : plain_rules()) {
    if (!rule.model_types.empty()) {
      const auto types = compile_rule(rule.model_types, "model_type", own);
      if (!re2::RE2::FullMatch(model_type, *types)) continue;
    }
    rules_.emplace_back(compile_rule(rule.pattern, "rules", own), &rule);
  }
  for (const std::string_view pattern : partner_patterns) {
    partners_.push_back(compile_rule(pattern, "rules", own));
  }
}

bool Chooser::is_excluded(const std::string& name) const { return finds_any(exclude_, name); }
bool Chooser::is_included(const std::string& name) const { return finds_any(include_, name); }

std::optional<std::string_view> reason_of_value(const TargetRecipe& recipe) {
  if (recipe.constant != nullptr) return "constant";
  if (recipe.shape.numel() == 0) return "no elements";
  if (!is_encodable(recipe.dtype)) return "dtype other than F32, F16 or BF16";
  return std::nullopt;
}

std::optional<std::string_view> Chooser::reason(const TargetRecipe& recipe) const {
  if (recipe.shape.rank() < 2) return "not a matrix";
  if (const auto why = reason_of_value(recipe)) return why;
  const std::string& name = recipe.target;
  if (is_excluded(name)) return "excluded";
  if (is_included(name)) return std::nullopt;
  if (const PlainRule* const rule = first_rule(RuleUse::plain, name)) return rule->reason;
  if (!is_in(*weight_, name)) return no_weight;
  if (!is_in(*layer_, name)) return "outside the decoder layers";
  if (is_beyond(name)) return "layer of the multi-token prediction";
  if (recipe.shape.rank() > 3) return "more than three dimensions";
  return std::nullopt;
}

std::optional<std::string_view> Chooser::reason_in_bnb(
    const TargetRecipe& recipe, const std::function<bool(const std::string&)>& has) const {
  constexpr std::string_view output = "out_proj.weight";
  const std::string& name = recipe.target;
  if (recipe.shape.rank() != 2) return "bitsandbytes has layers only for matrices";
  if (is_included(name)) return std::nullopt;
  if (name.ends_with(output) &&
      has(name.substr(0, name.size() - output.size()) + "in_proj_weight")) {
    return "weight of nn.MultiheadAttention, which reads it without calling its layer";
  }
  if (const PlainRule* const rule = first_rule(RuleUse::bnb, name)) return rule->reason;
  return std::nullopt;
}

std::optional<std::string_view> Chooser::other_layer(const std::string& name) const {
  const PlainRule* const rule = first_rule(RuleUse::plain, name);
  if (rule != nullptr && !rule->is_linear) return rule->reason;
  if (!is_in(*weight_, name)) return no_weight;
  return std::nullopt;
}

const PlainRule* Chooser::first_rule(RuleUse use, const std::string& name) const {
  const auto found = std::ranges::find_if(rules_, [&](const auto& each) {
    return each.second->use == use && is_in(*each.first, name);
  });
  const bool is_found = found != rules_.end() && found->second->reason != PlainRule::is_read;
  return is_found ? found->second : nullptr;
}

Chooser::Format* Chooser::format_for(const std::string& name) {
  for (Format& format : formats_) {
    if (format.pattern != nullptr && !is_in(*format.pattern, name)) continue;
    ++format.tensors;
    return &format;
  }
  return nullptr;
}

Chooser::Format* Chooser::encoding_for(const std::string& name) {
  Format* const format = format_for(name);
  if (format == nullptr || format->quantization->encoding != no_encoding) return format;
  ++format->made;
  return nullptr;
}

std::string Chooser::group_of(const std::string& name) const {
  for (std::size_t i = 0; i < partners_.size(); ++i) {
    std::string prefix;
    if (re2::RE2::FullMatch(name, *partners_[i], &prefix)) {
      return fmt::format("{}:{}", i, prefix);
    }
  }
  return {};
}

std::string Chooser::pattern_of(std::string_view group) {
  const std::size_t colon = group.find(':');
  const std::string_view prefix = group.substr(colon + 1);
  const std::string_view module = prefix.substr(prefix.rfind('.') + 1);
  const std::string_view whole = partner_patterns[std::stoul(std::string(group.substr(0, colon)))];
  // The rest of the pattern begins with the dot that follows the first group.
  return fmt::format("{}{}", is_digits(module) ? "" : R"(\b)" + re2::RE2::QuoteMeta(module),
                     whole.substr(whole.find(R"()\.)") + 1));
}

// Returns the error for a pattern that matches no name, with the most similar names.
static Finding unmatched(std::string_view option, const Pattern& pattern,
                         const std::vector<std::string>& names) {
  std::string text = printable(pattern->pattern());
  return {.severity = Severity::error,
          .code = "plan.options",
          .message = fmt::format("the pattern '{}' ({}) matches no tensor", text, option),
          .suggestion = nearest_names(pattern->pattern(), names),
          .found = std::move(text)};
}

void Chooser::report_format(const Format& format, const std::vector<std::string>& names,
                            bool finds_name, std::vector<Finding>& findings) const {
  const std::string& encoding = format.quantization->encoding;
  if (format.made > 0 || (encoding == no_encoding && finds_name)) return;
  const auto has_made = [](const Format& each) { return each.made > 0; };
  const bool is_usual = format.pattern == nullptr;
  if (!finds_name) {
    findings.push_back(unmatched("quantize", format.pattern, names));
    return;
  }
  // True if earlier formats took all tensors that match this format.
  const bool is_left_out = format.tensors == 0 && std::ranges::any_of(formats_, has_made);
  const std::string pattern = is_usual ? std::string() : printable(format.pattern->pattern());
  Finding finding = {.severity = is_left_out ? Severity::warning : Severity::error,
                     .code = "convert.left_alone",
                     .found = pattern};
  if (is_usual) {
    finding.message = fmt::format("no tensor would be quantized to {}", encoding);
  } else {
    finding.message =
        fmt::format("the pattern '{}' (quantize) matches no tensor that would be quantized to {}",
                    pattern, encoding);
  }
  if (!format.misfit.empty()) {
    finding.message += "; the first chosen tensor is " + format.misfit;
    finding.suggestion = "choose an encoding that supports these shapes";
  } else if (include_.empty()) {
    finding.suggestion = exclude_.empty()
                             ? "to quantize more tensors than loadstone chooses, pass --include"
                             : "exclude fewer tensors";
  }
  findings.push_back(std::move(finding));
}

void Chooser::report(const std::vector<std::string>& names,
                     const std::function<bool(const std::string&)>& is_made,
                     std::vector<Finding>& findings) const {
  if (has_errors(findings)) return;  // those errors explain why patterns have no effect
  const auto found_by = [&](const Pattern& pattern) {
    return std::ranges::find_if(names,
                                [&](const std::string& name) { return is_in(*pattern, name); });
  };
  for (const Format& format : formats_) {
    const bool finds_name =
        format.pattern == nullptr || format.tensors > 0 || found_by(format.pattern) != names.end();
    report_format(format, names, finds_name, findings);
  }
  for (const Pattern& pattern : include_) {
    const auto is_included = [&](const std::string& name) {
      return is_in(*pattern, name) && is_made(name);
    };
    if (std::ranges::any_of(names, is_included)) continue;
    const auto first = found_by(pattern);
    if (first == names.end()) {
      findings.push_back(unmatched("include", pattern, names));
      continue;
    }
    const std::string text = printable(pattern->pattern());
    findings.push_back(
        {.severity = Severity::error,
         .code = "convert.left_alone",
         .message = fmt::format("the pattern '{}' (include) matches no tensor that can be "
                                "quantized: '{}' stays unchanged",
                                text, printable(*first)),
         .found = text});
  }
  for (const Pattern& pattern : exclude_) {
    if (found_by(pattern) == names.end()) findings.push_back(unmatched("exclude", pattern, names));
  }
}

bool Chooser::is_beyond(const std::string& name) const {
  std::uint64_t number = 0;
  return layers_ && re2::RE2::PartialMatch(name, *layer_number_, &number) && number >= *layers_;
}

}  // namespace loadstone
