
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
#include "convert/choose/partners.h"
#include "convert/choose/quantize_config.h"
#include "convert/choose/readers.h"
#include "convert/experts.h"
#include "convert/json_text.h"
#include "convert/repack.h"

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

// Not thread-safe.
class Choosing {
 public:
  Choosing(const ConvertOptions& options, Chooser& chooser, Choices& choices,
           std::vector<Finding>& findings)
      : chooser_(chooser),
        choices_(choices),
        findings_(findings),
        readers_(options, chooser, findings),
        style_(options.quantize.style.value_or(QuantizeStyle::unified)),
        has_conv1d_(loadstone::has_conv1d(options.folder.config)) {}

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
    readers_.report(names_of(recipes));
  }

 private:
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
    if (written != nullptr) readers_.add(recipe.target, recipe.shape, *written, unread);
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

  Chooser& chooser_;
  Choices& choices_;
  std::vector<Finding>& findings_;
  Readers readers_;
  const QuantizeStyle style_;
  const bool has_conv1d_;
  std::set<std::string, std::less<>> names_;
  // Tensors whose shape an encoding cannot take, by name, shape, encoding and reason.
  std::map<std::tuple<std::string, std::string, std::string, std::string>, Alike> misfits_;
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

std::string folded_list(const std::vector<std::string>& names) {
  constexpr std::size_t shown_max = 8;
  std::map<std::string, Alike> groups;
  for (const std::string& name : names) groups[folded_name(name)].add(name);
  std::vector<std::string> shown;
  std::size_t more = names.size();
  for (const auto& [folded, alike] : groups) {
    if (shown.size() == shown_max) break;
    more -= alike.count;
    shown.push_back(alike.count == 1 ? fmt::format("'{}'", printable(alike.first))
                                     : fmt::format("'{}' ({})", printable(folded), alike.count));
  }
  return fmt::format("{}{}", fmt::join(shown, ", "),
                     more == 0 ? std::string() : fmt::format(" and {} more", more));
}

void report_repacked(const ConvertOptions& options, const std::vector<RepackedTensor>& repacked,
                     const Recipes& recipes, std::vector<Finding>& findings) {
  std::vector<std::string> names = names_of(recipes);
  const std::set<std::string_view> components = repacked_targets(repacked);
  std::erase_if(names, [&](const std::string& each) { return components.contains(each); });
  const Chooser chooser(options.quantize, options.folder.config);
  Readers readers(options, chooser, findings);
  for (const RepackedTensor& tensor : repacked) {
    names.push_back(tensor.name);
    readers.add(tensor.name, tensor.shape, written_encoding(tensor.quantization),
                chooser.other_layer(tensor.name));
  }
  readers.report(names);
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
  if (!is_config_of_diffusers(config)) report_mixed_partners(recipes, chooser, choices, findings);
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
