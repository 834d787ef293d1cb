#include "convert/output_recipes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "catalog/expert_series.h"
#include "catalog/lacking.h"
#include "codec/tensor_table.h"
#include "convert/choose/choose.h"
#include "convert/merge.h"
#include "convert/repack.h"
#include "convert/values.h"
#include "convert/write/extras.h"
#include "convert/write/state.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/tensor_reader.h"
#include "plan/produce.h"
#include "plan/rules.h"

namespace loadstone {

namespace {

// Turns the results of rules into recipes. Not thread-safe.
class OutputPlanner {
 public:
  // `values`: recipes that replace the caller's recipes.
  OutputPlanner(const Catalog& catalog, const ConvertOptions& options, Recipes values,
                const std::vector<std::string>& known_sources, std::vector<Finding>& findings)
      : catalog_(catalog),
        options_(options),
        quantized_(catalog.quantized()),
        rules_(options.rules),
        recipes_(values.targets.empty() ? options.recipes : std::move(values)),
        production_(catalog, rules_, plan_options(recipes_, known_sources)),
        findings_(findings) {}

  Recipes run() && {
    for (TargetRecipe& recipe : recipes_.targets) cast_to_wanted(recipe);
    report_contests();
    const bool all_is_known = !options_.recipes.targets.empty() && options_.rules.empty();
    for (Produced& item : production_.items()) {
      if (item.recipe != Produced::none) continue;
      note_matches(item);
      // The output contains the components under their own names, not the decoded values.
      if (std::ranges::all_of(item.members, &Member::is_numbers)) continue;
      if (std::ranges::any_of(item.members, &Member::is_numbers)) {
        fail(item, "plan.dtype", {"is made from quantized weights and plain tensors"});
      } else if (!all_is_known || item.rule != Produced::none) {
        add(item);
      }
    }
    report_lacking();
    report_idle_rules();
    return std::move(recipes_);
  }

 private:
  static PlanOptions plan_options(const Recipes& recipes,
                                  const std::vector<std::string>& known_sources) {
    PlanOptions plan;
    plan.recipes = recipes;
    plan.caller.known_sources = known_sources;
    return plan;
  }

  // Returns the output dtype for a source's dtype. `is_plain`: the source is FP8 without scales.
  [[nodiscard]] Dtype wanted(Dtype dtype, bool is_plain) const {
    if (is_plain && options_.dequantize) return options_.dtype.value_or(options_.block_dtype);
    return options_.dtype && (is_plain || is_wide_float(dtype)) ? *options_.dtype : dtype;
  }

  void cast_to_wanted(TargetRecipe& recipe) const {
    // A constant of a repacked tensor is a scale, which must stay exact.
    if (has_component(catalog_, recipe) || (repacks(options_) && recipe.constant != nullptr))
      return;
    const bool is_plain = is_plain_fp8(catalog_, recipe);
    const Dtype before = std::exchange(recipe.dtype, wanted(recipe.dtype, is_plain));
    if (recipe.constant == nullptr || recipe.dtype == before) return;
    recipe.constant = cast_constant(*recipe.constant, before, recipe.dtype);
  }

  // Returns the output dtype of a source. Kept codes and their scales keep their dtype, because
  // they must stay exact.
  [[nodiscard]] Dtype dtype_of(std::uint32_t source) const {
    const Encoding encoding = catalog_.tensors()[source].encoding;
    if (!encoding.is_dtype()) return options_.dtype.value_or(options_.block_dtype);
    if (quantized_.is_component(source)) return encoding.dtype();
    return wanted(encoding.dtype(), is_plain_fp8(catalog_, source));
  }

  // Returns the dtype of joined sources. Different float dtypes become F32, which can represent
  // them all.
  [[nodiscard]] std::optional<Dtype> common_dtype(const Produced& item) const {
    Dtype common = dtype_of(item.members.front().source);
    for (const Member& member : item.members) {
      const Dtype dtype = dtype_of(member.source);
      if (dtype == common) continue;
      if (!is_wide_float(dtype) || !is_wide_float(common)) return std::nullopt;
      common = dtype == Dtype::f64 || common == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    }
    return common;
  }

  void fail(const Produced& item, std::string code, const Problem& problem) {
    findings_.push_back({.severity = Severity::error,
                         .code = std::move(code),
                         .target = item.name,
                         .sources = production_.source_names(item),
                         .message = fmt::format("'{}' {}", printable(item.name), problem.message),
                         .found = problem.found,
                         .expected = problem.expected});
  }

  void report_contests() {
    for (const Contest& contest : production_.contests()) {
      const Produced& winner = production_.items()[contest.winner];
      const std::string& loser = catalog_.tensors()[contest.losers.front()].name;
      fail(winner, "plan.duplicate",
           {fmt::format("would also get its value from '{}'", printable(loser))});
      findings_.back().sources.push_back(loser);
    }
  }

  // Reports missing tensors of numbered series. If the catalog has already reported a gap, that
  // finding becomes an error, because a rule needs the tensor.
  void report_lacking() {
    for (Finding& finding : lacking_.findings()) {
      const auto known = std::ranges::find_if(findings_, [&](const Finding& other) {
        return other.code == finding.code &&
               std::ranges::find(other.sources, finding.sources.front()) != other.sources.end();
      });
      if (known == findings_.end()) {
        findings_.push_back(std::move(finding));
      } else {
        known->severity = Severity::error;
      }
    }
  }

  void note_matches(const Produced& item) {
    for (const Member& member : item.members) {
      if (item.rule == Produced::none) continue;
      const std::string& stored = catalog_.tensors()[member.source].name;
      RuleMatch match;
      if (!member.is_numbers) {
        taking_.insert({item.rule, member.pattern});
      } else if (!rules_.match(stored, match)) {
        passed_.try_emplace({item.rule, member.pattern}, member.name, stored);
      }
    }
  }

  // Warns of rules without a match: their pattern may be mistyped, or name a weight whose codes
  // have a different name.
  void report_idle_rules() {
    std::vector<std::string> idle;
    std::vector<std::string> passed;
    for (std::uint32_t r = 0; r < options_.rules.size(); ++r) {
      const std::vector<std::string>& sources = options_.rules[r].sources;
      for (std::uint32_t p = 0; p < sources.size(); ++p) {
        if (passed_.contains({r, p})) {
          passed.push_back(sources[p]);
        } else if (!taking_.contains({r, p})) {
          idle.push_back(sources[p]);
        }
      }
    }
    warn_of_rules("these rules match no tensor of the checkpoint: ", idle, {});
    if (passed.empty()) return;
    const auto& [weight, stored] = passed_.begin()->second;
    warn_of_rules(
        "these patterns of rules match decoded names, but the checkpoint stores the quantized "
        "weights under other names: ",
        passed,
        fmt::format("'{}' is stored as '{}', so the rule does not change it: write the rule for "
                    "the names in the files",
                    printable(weight), printable(stored)));
  }

  void warn_of_rules(const char* what, const std::vector<std::string>& patterns,
                     std::string suggestion) {
    if (patterns.empty()) return;
    findings_.push_back({.severity = Severity::warning,
                         .code = "plan.pattern",
                         .message = what + name_list(patterns, patterns.size()),
                         .suggestion = std::move(suggestion)});
  }

  void add(Produced& item) {
    for (Member& member : item.members) {
      member.is_numbers = !catalog_.tensors()[member.source].encoding.is_dtype();
    }
    // The expected count is unknown, because no model declares it.
    const SeriesGaps gaps = production_.source_gaps(item, Shape());
    if (!gaps.ok()) return lacking_.add(item.name, gaps);
    View view;
    if (auto problem = production_.view_of(item, view)) {
      problem->message = "cannot be made: " + problem->message;
      return fail(item, "plan.shape", *problem);
    }
    const auto dtype = common_dtype(item);
    if (!dtype) {
      fail(item, "plan.dtype", {"is made from sources without a common dtype"});
      return;
    }
    TargetRecipe recipe = {
        .target = item.name, .shape = view.shape, .dtype = *dtype, .boxes = boxes_of(view)};
    for (Box& box : recipe.boxes) {
      // Copy from the blocks themselves: the planner decodes them.
      if (box.source >= production_.numbers_begin()) box.source -= production_.numbers_begin();
    }
    recipes_.targets.push_back(std::move(recipe));
  }

  const Catalog& catalog_;
  const ConvertOptions& options_;
  const QuantizedTensors& quantized_;
  CompiledRules rules_;
  Recipes recipes_;
  Production production_;
  LackingSeries lacking_;
  std::vector<Finding>& findings_;
  // Index of a rule, index of its pattern.
  using PatternId = std::pair<std::uint32_t, std::uint32_t>;
  std::set<PatternId> taking_;
  // By pattern: the first matching weight whose codes no rule matches, and the name of its codes.
  std::map<PatternId, std::pair<std::string, std::string>> passed_;
};

// Sorts recipes by the position of their source, so that a shard of the output reads neighbouring
// bytes.
void sort_by_source(const Catalog& catalog, Recipes& recipes) {
  const auto place = [&](const TargetRecipe& recipe) {
    const std::uint32_t source = recipe.boxes.empty() ? 0 : recipe.boxes.front().source;
    return std::pair(catalog.tensors()[source].shard, catalog.tensors()[source].offset_begin);
  };
  std::ranges::stable_sort(recipes.targets, {}, place);
}

constexpr Dtype plain_fp8_dtype = Dtype::bf16;

bool copies_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe) {
  return !recipe.boxes.empty() && recipe.merge == nullptr &&
         std::ranges::all_of(recipe.boxes, [&](const Box& box) {
           return box.decoding == no_decoding && is_plain_fp8(catalog, box.source);
         });
}

// Returns true for integers that look like codes. Position ids are also I64, but have only one row.
bool is_array_of_integers(const TensorInfo& tensor) {
  if (is_dtype(tensor, {Dtype::i64, Dtype::u64})) {
    const auto is_several = [](std::uint64_t extent) { return extent > 1; };
    return std::ranges::count_if(tensor.shape.extents(), is_several) > 1;
  }
  return tensor.shape.numel().value_or(0) > 1 &&
         is_dtype(tensor, {Dtype::i8, Dtype::u8, Dtype::i16, Dtype::u16, Dtype::i32, Dtype::u32});
}

constexpr std::uint64_t chunk_elements = std::uint64_t{1} << 17;

void add_values(Digest& digest, const std::shared_ptr<const Catalog>& catalog,
                const std::string& name) {
  TensorReader reader(catalog, name);
  add_text(digest, loadstone::name(reader.dtype()));
  add_text(digest, reader.shape().text());
  std::vector<std::byte> bytes;
  for (std::uint64_t begin = 0; begin < reader.elements(); begin += chunk_elements) {
    const std::uint64_t end = std::min(begin + chunk_elements, reader.elements());
    bytes.resize(Encoding(reader.dtype()).byte_count(end - begin).value_or(0));
    reader.read(begin, end, bytes);
    digest.update(bytes);
  }
}

std::string digest_of(const std::shared_ptr<const Catalog>& catalog,
                      std::span<const std::uint32_t> sources) {
  Digest digest;
  add_text(digest, claims_beside(*catalog).config);
  for (const std::uint32_t source : sources) {
    add_values(digest, catalog, catalog->tensors()[source].name);
  }
  return digest.hex();
}

// Warns if constants in the recipes were computed for a different checkpoint. Returns nullopt if
// config.json and the constants' sources are the same, or if the recipes have no digest of them.
std::optional<Finding> foreign_values(const std::shared_ptr<const Catalog>& catalog,
                                      const Recipes& recipes) {
  std::vector<std::string> names;
  for (const TargetRecipe& recipe : recipes.targets) {
    if (recipe.constant != nullptr) names.push_back(recipe.target);
  }
  if (names.empty() || recipes.values_digest.empty()) return std::nullopt;
  if (digest_of(catalog, recipes.computed_from) == recipes.values_digest) return std::nullopt;
  Finding finding = {.severity = Severity::warning, .code = "convert.constants"};
  finding.target = names.front();
  finding.message = fmt::format(
      "the recipes contain the values of {}, computed for another checkpoint: its config.json{} "
      "not the source's",
      name_list(names, 3), recipes.computed_from.empty() ? " is" : " or tensors are");
  finding.suggestion = "make the recipes again from this checkpoint";
  return finding;
}

}  // namespace

std::vector<std::string> tensor_names(const Catalog& catalog,
                                      const std::vector<std::uint32_t>& tensors) {
  std::vector<std::string> names;
  for (const std::uint32_t tensor : tensors) names.push_back(catalog.tensors().at(tensor).name);
  return names;
}

Values output_recipes(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
                      bool is_decoded, std::vector<Finding>& findings) {
  std::set<std::string, std::less<>> broken;
  // If recipes are given, they determine which experts are needed.
  if (options.recipes.targets.empty()) broken = check_expert_series(*catalog, findings);
  Values values = repacks(options) ? repacked_values(catalog, options, findings)
                  : options.merge  ? merged_values(catalog, options, findings)
                                   : decoded_values(catalog, options, is_decoded, broken, findings);
  const bool has_values = !values.recipes.targets.empty();
  values.recipes = OutputPlanner(*catalog, options, std::move(values.recipes),
                                 tensor_names(*catalog, values.dropped), findings)
                       .run();
  if (has_values) sort_by_source(*catalog, values.recipes);
  const auto& computed_from = options.recipes.computed_from;
  values.dropped.insert(values.dropped.end(), computed_from.begin(), computed_from.end());
  if (auto foreign = foreign_values(catalog, options.recipes)) {
    findings.push_back(*std::move(foreign));
  }
  return values;
}

bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe) {
  const bool is_fp8 = recipe.dtype == Dtype::f8_e4m3 || recipe.dtype == Dtype::f8_e5m2;
  return is_fp8 && copies_plain_fp8(catalog, recipe);
}

bool may_hold_codes(const Catalog& catalog) {
  for (std::uint32_t i = 0; i < catalog.tensors().size(); ++i) {
    if (is_plain_fp8(catalog, i) || is_array_of_integers(catalog.tensors()[i])) return true;
  }
  return false;
}

void widen_plain_fp8(const Catalog& catalog, Recipes& recipes) {
  for (TargetRecipe& recipe : recipes.targets) {
    if (is_plain_fp8(catalog, recipe)) recipe.dtype = plain_fp8_dtype;
  }
}

void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes) {
  for (TargetRecipe& recipe : recipes.targets) {
    if (recipe.dtype != plain_fp8_dtype || !copies_plain_fp8(catalog, recipe)) continue;
    if (choices.quantize.contains(recipe.target) || choices.numbers.contains(recipe.target)) {
      continue;
    }
    recipe.dtype = catalog.tensors()[recipe.boxes.front().source].encoding.dtype();
  }
}

void note_values(Recipes& recipes, const std::shared_ptr<const Catalog>& catalog,
                 const std::vector<std::string>& computed_from) {
  only_errors([&] {
    std::vector<std::uint32_t> sources;
    for (const std::string& each : computed_from) {
      const auto source = catalog->find(each);
      if (!source) {
        throw Error("plan.missing", "the checkpoint has no tensor of this name", {.tensor = each});
      }
      sources.push_back(*source);
    }
    recipes.values_digest = digest_of(catalog, sources);
    recipes.computed_from = std::move(sources);
  });
}

}  // namespace loadstone
