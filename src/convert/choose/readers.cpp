#include "convert/choose/readers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/text.h"
#include "convert/choose/quantize_config.h"
#include "convert/experts.h"
#include "convert/json_text.h"

namespace loadstone {

namespace {

// The encodings of one layer of experts. Not thread-safe.
class MixedExperts {
 public:
  void add(ExpertRole role, const std::string& kind) { roles_[role].insert(kind); }

  [[nodiscard]] std::set<std::string> kinds() const {
    std::set<std::string> all;
    for (const auto& [role, kinds] : roles_) all.insert(kinds.begin(), kinds.end());
    return all;
  }

  // Returns true if transformers cannot join the layer's experts. transformers joins each role
  // separately, but can decode only FP8 without knowing the encodings of the other roles.
  [[nodiscard]] bool is_mixed() const {
    const auto is_apart = [](const std::string& kind) {
      const WrittenEncoding* const written = find_written_encoding(kind);
      return written == nullptr || (written->bits == 8 && written->code_type == "float");
    };
    const std::set<std::string> all = kinds();
    if (all.size() > 1 && !std::ranges::all_of(all, is_apart)) return true;
    return std::ranges::any_of(roles_, [](const auto& each) { return each.second.size() > 1; });
  }

 private:
  std::map<ExpertRole, std::set<std::string>> roles_;
};

}  // namespace

Readers::Readers(const ConvertOptions& options, const Chooser& chooser,
                 std::vector<Finding>& findings)
    : chooser_(chooser),
      findings_(findings),
      style_(options.quantize.style.value_or(QuantizeStyle::unified)),
      is_of_diffusers_(!options.one_file &&
                       !string_member(options.folder.config, "_class_name").empty()) {}

void Readers::add(const std::string& name, const Shape& shape, const WrittenEncoding& written,
                  std::optional<std::string_view> unread) {
  quantized_.emplace(name, written.name);
  const NamingStyle naming = naming_style(written, style_);
  has_reader_ = has_reader_ || naming != NamingStyle::unified;
  if (naming == NamingStyle::compressed && shape.rank() > 2) stacks_.push_back(name);
  if (!unread && is_of_diffusers_ && !written.is_bitsandbytes()) {
    unread = "diffusers has no quantizer for them";
    unread_[*unread].advice =
        "choose nf4, fp4 or int8, or open the folder with loadstone.diffusers.from_pretrained()";
  }
  if (!unread) {
    const PlainRule* const rule = rule_for(name, written, naming);
    if (rule == nullptr) return;
    unread = rule->reason;
    unread_[rule->reason].advice = rule->advice;
  }
  unread_[*unread].codes.push_back(name);
}

// Returns the rule by which readers of the style would misread the codes as values, or null.
const PlainRule* Readers::rule_for(const std::string& name, const WrittenEncoding& written,
                                   NamingStyle naming) const {
  if (naming == NamingStyle::unified) return chooser_.first_rule(RuleUse::scattered, name);
  const PlainRule* const rule = chooser_.first_rule(RuleUse::split, name);
  const bool joins_codes = naming != NamingStyle::compressed || !written.decodes_experts;
  if (rule != nullptr || !joins_codes) return rule;
  return chooser_.first_rule(RuleUse::joined, name);
}

void Readers::report(const std::vector<std::string>& names) {
  add_lost(names);
  report_unread();
  report_mixed(names);
  report_mixed_dense();
  report_stacks();
}

void Readers::warn(std::vector<std::string> names, std::string message,
                   std::string_view suggestion) {
  findings_.push_back({.severity = Severity::warning,
                       .code = "convert.unread",
                       .sources = std::move(names),
                       .message = std::move(message),
                       .suggestion = std::string(suggestion)});
}

void Readers::report_stacks() {
  if (stacks_.empty()) return;
  const bool has_known_layout = std::ranges::any_of(
      stacks_, [&](const std::string& name) { return has_single_experts(name); });
  findings_.push_back(
      {.severity = Severity::error,
       .code = "plan.options",
       .target = stacks_.front(),
       .message =
           fmt::format("the style {} has no layout for tensors of several matrices ({}): {}",
                       name(style_), counted(stacks_.size(), "tensor"), folded_list(stacks_)),
       .suggestion = fmt::format(
           "{}choose the style {}{}",
           has_known_layout ? "first separate the experts (convert --experts separate), " : "",
           name(QuantizeStyle::unified),
           quantized_.size() > stacks_.size() ? ", or exclude the tensors (--exclude)" : "")});
}

// Returns true if a reader joins the single experts that --experts separate makes of this stack.
bool Readers::has_single_experts(const std::string& stack) const {
  constexpr std::string_view experts = ".experts.";
  const auto at = stack.find(experts);
  if (at == std::string::npos || !stack.ends_with(fused_gate_up)) return false;
  const std::string single = stack.substr(0, at) + std::string(experts) + "0.";
  return chooser_.first_rule(RuleUse::split, single) == nullptr;
}

// Adds plain tensors that a library does not find next to quantized tensors.
void Readers::add_lost(const std::vector<std::string>& all) {
  const RuleUse use = has_reader_ ? RuleUse::lost : RuleUse::scattered;
  for (const std::string& name : all) {
    if (quantized_.contains(name)) continue;
    const PlainRule* const rule = chooser_.first_rule(use, name);
    if (rule == nullptr) continue;
    Unread& unread = unread_[rule->reason];
    unread.advice = rule->advice;
    unread.plain.push_back(name);
  }
}

// Adds one warning per advice, because the same advice needs no second warning.
void Readers::report_unread() {
  struct Group {
    std::vector<std::string> parts;
    std::vector<std::string> names;
  };
  std::map<std::pair<std::string_view, std::string_view>, Group> groups;
  for (const auto& [reason, unread] : unread_) {
    const auto& [advice, codes, plain] = unread;
    std::vector<std::string> kinds;
    if (!codes.empty()) {
      kinds.push_back(fmt::format("the codes of {} as codes", counted(codes.size(), "tensor")));
    }
    if (!plain.empty()) {
      kinds.push_back(counted(plain.size(), "plain tensor") + " in a quantized checkpoint");
    }
    if (kinds.empty()) continue;
    Group& group = groups[{advice, advice.empty() ? reason : std::string_view()}];
    group.parts.push_back(fmt::format("{} ({})", fmt::join(kinds, ", nor "), reason));
    group.names.insert(group.names.end(), codes.begin(), codes.end());
    group.names.insert(group.names.end(), plain.begin(), plain.end());
  }
  for (auto& [key, group] : groups) {
    std::string message = fmt::format("libraries would not read {}: {}",
                                      fmt::join(group.parts, ", nor "), folded_list(group.names));
    warn(std::move(group.names), std::move(message), key.first);
  }
}

// Warns of layers whose experts a library cannot join.
void Readers::report_mixed(const std::vector<std::string>& all) {
  std::map<std::string, MixedExperts, std::less<>> layers;
  for (const std::string& name : all) {
    const auto expert = expert_name(name);
    if (!expert) continue;
    const auto found = quantized_.find(name);
    layers[expert->prefix].add(expert->role, found == quantized_.end() ? "plain" : found->second);
  }
  std::vector<std::string> names;
  std::set<std::string> kinds;
  for (auto& [name, experts] : layers) {
    if (!experts.is_mixed()) continue;
    names.push_back(name);
    kinds.merge(experts.kinds());
  }
  if (names.empty()) return;
  std::string message = fmt::format(
      "{} would have experts in several encodings ({}), but libraries need one encoding for all "
      "experts of a layer: {}",
      counted(names.size(), "layer"), fmt::join(kinds, ", "), folded_list(names));
  warn(std::move(names), std::move(message), "give all experts of a layer the same encoding");
}

// Warns of dense layers in several encodings: transformers dequantizes all of them by the scheme
// of one. This is right only if every encoding has one scale per tensor or row.
void Readers::report_mixed_dense() {
  if (style_ != QuantizeStyle::compressed_tensors || is_of_diffusers_) return;
  std::set<std::string> encodings;
  std::vector<std::string> names;
  for (const auto& [name, encoding] : quantized_) {
    if (expert_name(name)) continue;
    names.push_back(name);
    encodings.insert(encoding);
  }
  const auto has_scale_per_row = [](const std::string& encoding) {
    const std::string_view strategy = find_written_encoding(encoding)->compressed.strategy;
    return strategy == "tensor" || strategy == "channel";
  };
  if (encodings.size() < 2 || std::ranges::all_of(encodings, has_scale_per_row)) return;
  std::string message = fmt::format(
      "{} outside the experts would have several encodings ({}), but transformers dequantizes "
      "all of them by one scheme (dequantize=True): {}",
      counted(names.size(), "layer"), fmt::join(encodings, ", "), folded_list(names));
  warn(std::move(names), std::move(message),
       "give these layers the same encoding, or open the folder with "
       "loadstone.transformers.from_pretrained()");
}

bool is_style_read(QuantizeStyle style, const Plan& plan, ConvertOptions options) {
  options.quantize.style = style;
  std::vector<Finding> findings;
  const Chooser chooser(options.quantize, options.folder.config);
  Readers readers(options, chooser, findings);
  std::vector<std::string> names;
  for (const PlannedTarget& target : plan.targets) {
    names.push_back(target.name);
    if (!target.quantization) continue;
    readers.add(target.name, target.shape, written_encoding(*target.quantization),
                chooser.other_layer(target.name));
  }
  readers.report(names);
  return findings.empty();
}

}  // namespace loadstone
