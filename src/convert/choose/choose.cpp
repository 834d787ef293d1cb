
#include "convert/choose/choose.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/refuse_option.h"
#include "base/text.h"
#include "boxes/dims.h"
#include "catalog/conv1d.h"
#include "codec/encode.h"
#include "convert/choose/chooser.h"
#include "convert/choose/quantize_config.h"
#include "convert/choose/quantize_rules.h"
#include "convert/experts.h"
#include "convert/json_text.h"

namespace loadstone {

namespace {

// Divides the groups of tensors that share a scale by dtype, encoding and number of matrices. A
// tensor without partners leaves its group.
void part_groups(const Recipes& recipes, Choices& choices) {
  std::map<std::string, std::size_t, std::less<>> members;
  for (const TargetRecipe& recipe : recipes.targets) {
    const auto found = choices.quantize.find(recipe.target);
    if (found == choices.quantize.end() || found->second.group.empty()) continue;
    QuantizedLayout form;
    static_cast<void>(prepare_quantization(found->second, recipe.shape, recipe.dtype, form));
    Quantization& quantization = found->second;
    // ModelOpt's export of FP8 gives each tensor its own scale, except experts that it exports as
    // one tensor.
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

// Cuts a dimension that spans several rows into a dimension of rows and a dimension of columns.
// Returns false if a row is not a whole number of the dimension's steps.
bool add_cut(const BoxDim& dim, std::uint64_t columns, std::vector<BoxDim>& cut) {
  if (dim.target_stride % columns == 0 || dim.extent * dim.target_stride <= columns) {
    cut.push_back(dim);
    return true;
  }
  if (columns % dim.target_stride != 0) return false;
  const std::uint64_t per_row = columns / dim.target_stride;
  if (dim.extent % per_row != 0) return false;
  BoxDim rows = dim;
  rows.extent = dim.extent / per_row;
  rows.source_stride = dim.source_stride * per_row;
  rows.target_stride = columns;
  cut.push_back(rows);
  cut.push_back(dim);
  cut.back().extent = per_row;
  return true;
}

// Changes a box so that element [row, column] of its target becomes [column, row].
bool transpose(Box& box, std::uint64_t rows, std::uint64_t columns) {
  std::vector<BoxDim> dims;
  for (const BoxDim& dim : box.dims) {
    if (!add_cut(dim, columns, dims)) return false;
  }
  std::uint64_t last_column = box.target_offset % columns;
  for (BoxDim& dim : dims) {
    if (dim.target_stride % columns == 0) {
      dim.target_stride /= columns;
    } else {
      last_column += (dim.extent - 1) * dim.target_stride;
      dim.target_stride *= rows;
    }
  }
  if (last_column >= columns) return false;
  box.target_offset = box.target_offset % columns * rows + box.target_offset / columns;
  normalise(dims);
  box.dims = std::move(dims);
  return true;
}

// Swaps the dims of a matrix. Returns false and leaves the recipe unchanged if its values are
// merged or constant, or if a box is not made of whole rows or parts of rows.
bool transpose_recipe(TargetRecipe& recipe) {
  if (recipe.merge != nullptr || recipe.constant != nullptr || recipe.shape.rank() != 2) {
    return false;
  }
  const std::uint64_t rows = recipe.shape[0];
  const std::uint64_t columns = recipe.shape[1];
  if (rows == 0 || columns == 0) return false;
  std::vector<Box> boxes = recipe.boxes;
  for (Box& box : boxes) {
    if (!transpose(box, rows, columns)) return false;
  }
  recipe.boxes = std::move(boxes);
  recipe.shape = Shape({columns, rows});
  return true;
}

// Transposes the weight of a Conv1D layer, because bitsandbytes stores it transposed. Reports an
// error for a weight that cannot be transposed during the conversion.
void transpose_conv1d(TargetRecipe& recipe, std::string_view encoding,
                      std::vector<Finding>& findings) {
  if (transpose_recipe(recipe)) return;
  findings.push_back(
      {.severity = Severity::error,
       .code = "convert.left_alone",
       .target = recipe.target,
       .message = fmt::format("'{}' {} belongs to a Conv1D layer, whose {} codes bitsandbytes "
                              "stores transposed; a merge cannot write transposed codes",
                              printable(recipe.target), recipe.shape.text(), encoding),
       .suggestion = "write the merged model without --quantize, then quantize it with convert"});
}

// Returns true if readers of the style find the components by their names. Also returns true for
// stacks in the style compressed-tensors, which are reported as a separate error.
bool names_components(NamingStyle style, const TargetRecipe& recipe) {
  if (recipe.target.ends_with(".weight")) return true;
  const bool is_stack = recipe.shape.rank() > 2;
  return style != NamingStyle::bnb && (style != NamingStyle::compressed || is_stack);
}

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

// Not thread-safe.
class Choosing {
 public:
  Choosing(const ConvertOptions& options, Chooser& chooser, Choices& choices,
           std::vector<Finding>& findings)
      : chooser_(chooser),
        choices_(choices),
        findings_(findings),
        style_(options.quantize.style.value_or(QuantizeStyle::unified)),
        has_conv1d_(loadstone::has_conv1d(options.folder.config)),
        is_of_diffusers_(!options.one_file &&
                         !string_member(options.folder.config, "_class_name").empty()) {}

  void run(Recipes& recipes) {
    const std::vector<std::string> all = names_of(recipes);
    names_.insert(all.begin(), all.end());
    for (TargetRecipe& recipe : recipes.targets) {
      if (const auto why = chooser_.reason(recipe)) {
        if (recipe.shape.rank() >= 2) choices_.plain.emplace(recipe.target, *why);
      } else if (const auto reason = choose(recipe)) {
        choices_.plain.emplace(recipe.target, *reason);
      }
    }
    report_misfits();
    report_unread();
    report_lost(recipes);
    report_mixed(recipes);
    report_mixed_dense(recipes);
    report_stacks();
  }

 private:
  void warn_unread(std::vector<std::string> names, std::string message,
                   std::string_view suggestion) {
    findings_.push_back({.severity = Severity::warning,
                         .code = "convert.unread",
                         .sources = std::move(names),
                         .message = std::move(message),
                         .suggestion = std::string(suggestion)});
  }

  void report_misfits() {
    for (const auto& [key, tensors] : misfits_) {
      const auto& [folded, shape, encoding, message] = key;
      findings_.push_back(
          {.severity = Severity::warning,
           .code = "convert.left_alone",
           .target = tensors.first,
           .message = fmt::format("{} {} is not quantized: {} does not support it: {}",
                                  tensors.text(), shape, encoding, message),
           .suggestion = "choose another encoding for it, or exclude it (--exclude)"});
    }
  }

  void report_stacks() {
    if (stacks_.empty()) return;
    const bool has_known_layout = std::ranges::any_of(
        stacks_, [&](const std::string& name) { return has_single_experts(name); });
    findings_.push_back(
        {.severity = Severity::error,
         .code = "plan.options",
         .target = stacks_.front(),
         .message =
             fmt::format("the style {} has no layout for tensors of several matrices ({}): {}",
                         name(style_), counted(stacks_.size(), "tensor"), name_list(stacks_)),
         .suggestion = fmt::format(
             "{}choose the style {}, or exclude the tensors (--exclude)",
             has_known_layout ? "first separate the experts (convert --experts separate), " : "",
             name(QuantizeStyle::unified))});
  }

  // Returns true if a reader joins the single experts that --experts separate makes of this stack.
  [[nodiscard]] bool has_single_experts(const std::string& stack) const {
    constexpr std::string_view experts = ".experts.";
    const auto at = stack.find(experts);
    if (at == std::string::npos || !stack.ends_with(fused_gate_up)) return false;
    const std::string single = stack.substr(0, at) + std::string(experts) + "0.";
    return chooser_.first_rule(RuleUse::split, single) == nullptr;
  }

  void report_unread() {
    for (auto& [reason, unread] : unread_) {
      auto& [advice, names] = unread;
      std::string message =
          fmt::format("libraries would not read the codes of {} as codes ({}): {}",
                      counted(names.size(), "tensor"), reason, name_list(names));
      warn_unread(std::move(names), std::move(message), advice);
    }
  }

  // Warns of plain tensors that a library does not find next to quantized tensors.
  void report_lost(const Recipes& recipes) {
    const RuleUse use = has_reader_ ? RuleUse::lost : RuleUse::scattered;
    std::map<const PlainRule*, std::vector<std::string>> lost;
    for (const TargetRecipe& recipe : recipes.targets) {
      if (choices_.quantize.contains(recipe.target)) continue;
      const PlainRule* const rule = chooser_.first_rule(use, recipe.target);
      if (rule != nullptr) lost[rule].push_back(recipe.target);
    }
    for (auto& [rule, names] : lost) {
      std::string message =
          fmt::format("libraries would not read {} in a quantized checkpoint ({}): {}",
                      counted(names.size(), "plain tensor"), rule->reason, name_list(names));
      warn_unread(std::move(names), std::move(message), rule->advice);
    }
  }

  // Warns of layers whose experts a library cannot join.
  void report_mixed(const Recipes& recipes) {
    std::map<std::string, MixedExperts, std::less<>> layers;
    for (const TargetRecipe& recipe : recipes.targets) {
      const auto expert = expert_name(recipe.target);
      if (!expert) continue;
      const auto found = choices_.quantize.find(recipe.target);
      const bool is_plain = found == choices_.quantize.end();
      layers[expert->prefix].add(expert->role, is_plain ? "plain" : found->second.encoding);
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
        counted(names.size(), "layer"), fmt::join(kinds, ", "), name_list(names));
    warn_unread(std::move(names), std::move(message),
                "give all experts of a layer the same encoding");
  }

  // Warns of dense layers in several encodings: transformers dequantizes all of them by the scheme
  // of one. This is right only if every encoding has one scale per tensor or row.
  void report_mixed_dense(const Recipes& recipes) {
    if (style_ != QuantizeStyle::compressed_tensors || is_of_diffusers_) return;
    std::set<std::string> encodings;
    std::vector<std::string> names;
    for (const TargetRecipe& recipe : recipes.targets) {
      const auto found = choices_.quantize.find(recipe.target);
      if (found == choices_.quantize.end() || expert_name(recipe.target)) continue;
      names.push_back(recipe.target);
      encodings.insert(found->second.encoding);
    }
    const auto has_scale_per_row = [](const std::string& encoding) {
      const std::string_view strategy = find_written_encoding(encoding)->compressed.strategy;
      return strategy == "tensor" || strategy == "channel";
    };
    if (encodings.size() < 2 || std::ranges::all_of(encodings, has_scale_per_row)) return;
    std::string message = fmt::format(
        "{} outside the experts would have several encodings ({}), but transformers dequantizes "
        "all of them by one scheme (dequantize=True): {}",
        counted(names.size(), "layer"), fmt::join(encodings, ", "), name_list(names));
    warn_unread(std::move(names), std::move(message),
                "give these layers the same encoding, or open the folder with "
                "loadstone.transformers.from_pretrained()");
  }

  // Returns the reason to keep the tensor unchanged; nullopt if it gets an encoding.
  std::optional<std::string_view> choose(TargetRecipe& recipe) {
    Chooser::Format* const format = chooser_.encoding_for(recipe.target);
    if (format == nullptr) return "no requested format applies";
    Quantization quantization = *format->quantization;
    const WrittenEncoding* const written = find_written_encoding(quantization.encoding);
    const TargetRecipe before = recipe;
    const bool is_conv1d = has_conv1d_ && is_conv1d_weight(recipe.target);
    std::optional<std::string_view> unread = chooser_.other_layer(recipe.target);
    if (written != nullptr && written->is_bitsandbytes()) {
      const auto has = [&](const std::string& name) { return names_.contains(name); };
      if (const auto why = chooser_.reason_in_bnb(recipe, has)) return why;
      if (is_conv1d) transpose_conv1d(recipe, quantization.encoding, findings_);
    } else if (is_conv1d) {
      constexpr std::string_view why = "weight of transformers' Conv1D, not of nn.Linear";
      if (!chooser_.is_included(recipe.target)) return why;
      unread = why;
    }
    if (written != nullptr && !names_components(naming_style(*written, style_), recipe)) {
      constexpr std::string_view why = "files can name the components only of a '.weight'";
      add_misfit(recipe, quantization, why);
      return why;
    }
    QuantizedLayout form;
    auto problem = prepare_quantization(quantization, recipe.shape, recipe.dtype, form);
    const std::uint64_t block = problem ? 1 : written_encoding(quantization).row_block;
    if (!problem && recipe.shape.extents().back() % block != 0) {
      problem = Problem{fmt::format("its rows do not consist of whole blocks of {} values", block)};
    }
    if (problem) {
      recipe = before;
      add_misfit(recipe, quantization, problem->message);
      if (format->misfit.empty()) {
        format->misfit = fmt::format("'{}' {}: {}", printable(recipe.target), recipe.shape.text(),
                                     problem->message);
      }
      return "its shape does not fit the encoding";
    }
    ++format->made;
    if (written != nullptr) look_at_reader(recipe, *written, unread);
    if (unread) unread_[*unread].names.push_back(recipe.target);
    quantization.group = chooser_.group_of(recipe.target);
    choices_.quantize.emplace(recipe.target, std::move(quantization));
    return std::nullopt;
  }

  void add_misfit(const TargetRecipe& recipe, const Quantization& quantization,
                  std::string_view why) {
    misfits_[{folded_name(recipe.target), recipe.shape.text(), quantization.encoding,
              std::string(why)}]
        .add(recipe.target);
  }

  // Sets `unread` to the reason why readers of the style would misread the codes as values, if
  // there is one.
  void look_at_reader(const TargetRecipe& recipe, const WrittenEncoding& written,
                      std::optional<std::string_view>& unread) {
    if (is_of_diffusers_ && !written.is_bitsandbytes() && !unread) {
      unread = "diffusers has no quantizer for them";
      unread_[*unread].advice =
          "choose nf4, fp4 or int8, or open the folder with loadstone.diffusers.from_pretrained()";
    }
    const NamingStyle naming = naming_style(written, style_);
    if (naming == NamingStyle::unified) {
      if (!unread) set_unread(chooser_.first_rule(RuleUse::scattered, recipe.target), unread);
      return;
    }
    has_reader_ = true;
    if (naming == NamingStyle::compressed && recipe.shape.rank() > 2) {
      stacks_.push_back(recipe.target);
    }
    if (unread) return;
    const bool joins_codes = naming != NamingStyle::compressed || !written.decodes_experts;
    const PlainRule* rule = chooser_.first_rule(RuleUse::split, recipe.target);
    if (rule == nullptr && joins_codes) rule = chooser_.first_rule(RuleUse::joined, recipe.target);
    set_unread(rule, unread);
  }

  void set_unread(const PlainRule* rule, std::optional<std::string_view>& unread) {
    if (rule == nullptr) return;
    unread = rule->reason;
    unread_[rule->reason].advice = rule->advice;
  }

  struct Unread {
    std::string_view advice = PlainRule().advice;
    std::vector<std::string> names;
  };

  Chooser& chooser_;
  Choices& choices_;
  std::vector<Finding>& findings_;
  const QuantizeStyle style_;
  const bool has_conv1d_;
  const bool is_of_diffusers_;
  std::set<std::string, std::less<>> names_;
  std::vector<std::string> stacks_;  // stacks that the style has no layout for
  bool has_reader_ = false;          // true if transformers reads the codes of the style
  // Tensors whose shape an encoding cannot take, by name, shape, encoding and reason.
  std::map<std::tuple<std::string, std::string, std::string, std::string>, Alike> misfits_;
  // Quantized tensors whose codes libraries would not recognise, by the reason.
  std::map<std::string_view, Unread> unread_;
};

}  // namespace

std::vector<std::string> names_of(const Recipes& recipes) {
  std::vector<std::string> names;
  names.reserve(recipes.targets.size());
  for (const TargetRecipe& recipe : recipes.targets) names.push_back(recipe.target);
  return names;
}

std::string Alike::text() const {
  const std::string others = count > 1 ? fmt::format(" and {} similar ones", count - 1) : "";
  return fmt::format("'{}'{}", printable(first), others);
}

std::string folded_name(std::string_view name, std::vector<std::uint64_t>* numbers) {
  std::string folded;
  bool in_number = false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    // Only a component that consists of digits becomes *: "w1" stays.
    const bool begins = i == 0 || name[i - 1] == '.';
    if (is_digit(name[i]) && (begins || in_number)) {
      if (!in_number) {
        folded += '*';
        if (numbers != nullptr) numbers->push_back(0);
      }
      in_number = true;
      const auto digit = static_cast<std::uint64_t>(name[i] - '0');
      if (numbers != nullptr) numbers->back() = numbers->back() * 10 + digit;
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
  // Split a stack if its weights would be quantized.
  const std::size_t cut = split_stacks(
      recipes, string_member(config, "model_type"),
      [&](const TargetRecipe& recipe) { return !chooser.reason(recipe).has_value(); }, cut_max,
      findings);
  if (cut > 0 && options.experts == ExpertLayout::fused) {
    refuse_option("experts",
                  "files store quantized experts separately: exclude them (--exclude), or do not "
                  "pass --experts",
                  "fused", "separate");
  }
  Choosing(options, chooser, choices, findings).run(recipes);
  part_groups(recipes, choices);
  // `names` still contains stacks that were cut, but the recipes contain their experts instead.
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
