// Plans a conversion: the output's tensors, their places in files, and the required resources.

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <set>
#include <utility>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "catalog/transform_claim.h"
#include "codec/encode.h"
#include "codec/tensor_table.h"
#include "convert/choose/choose.h"
#include "convert/choose/gguf_choose.h"
#include "convert/choose/quantize_config.h"
#include "convert/config_findings.h"
#include "convert/given_options.h"
#include "convert/json_text.h"
#include "convert/kept_blocks.h"
#include "convert/layout.h"
#include "convert/lossless.h"
#include "convert/moved_codes.h"
#include "convert/other_models.h"
#include "convert/output_recipes.h"
#include "convert/quantize_rows.h"
#include "convert/repack.h"
#include "convert/separate_experts.h"
#include "convert/tied_head.h"
#include "convert/values.h"
#include "convert/write/container.h"
#include "convert/write/extras.h"
#include "loadstone/convert.h"
#include "loadstone/quantized_tensors.h"
#include "plan/planner.h"

namespace loadstone {

namespace {

// A reason to reject an option: it conflicts with other options, or its value is never allowed.
struct Refusal {
  bool applies;
  const char* field;
  const char* message;
  std::string found = {};
};

constexpr const char* needs_names =
    "rules and recipes need the names of the source's file, which this option changes: convert "
    "twice";

void refuse_first(std::initializer_list<Refusal> refusals) {
  for (const Refusal& each : refusals) {
    if (each.applies) refuse_option(each.field, each.message, each.found);
  }
}

// Rejects options that conflict with a repack, because codes that are kept retain their names and
// the layout of their experts.
void check_repack(const ConvertOptions& options) {
  const std::string style(name(*options.quantize.style));
  refuse_first({
      {options.dequantize || options.merge, "style",
       "a style was passed, but no tensor of the output is quantized", style},
      {options.format != FileFormat::safetensors, "style",
       "GGUF files have a fixed style: omit this option", style},
      {options.experts != ExpertLayout::keep, "style",
       "a conversion that keeps codes cannot change the style and the layout of experts: pass "
       "--quantize with the encoding of the codes (quantize=), or convert twice",
       style},
      {names_are_given(options), "style",
       "one conversion can change either the style of codes or their names: convert twice", style},
  });
}

void check_options(const ConvertOptions& options) {
  const auto is_float = [](Dtype dtype) {
    return kind(dtype) == DtypeKind::floating && bits(dtype) % 8 == 0;
  };
  const Dtype dtype = options.dtype.value_or(Dtype::f32);
  const Dtype block = options.block_dtype;
  const std::string& stem = options.stem;
  const bool has_path = stem.find_first_of(std::string_view("/\0", 2)) != std::string::npos;
  const QuantizeOptions& quantize = options.quantize;
  const bool quantizes = !quantize.formats.empty();
  refuse_first({
      {!is_float(dtype), "dtype", "tensors can be cast only to a float dtype with whole bytes",
       std::string(name(dtype))},
      {block != Dtype::f32 && block != Dtype::bf16 && block != Dtype::f16, "block_dtype",
       "blocks can be decoded only to F32, BF16 or F16", std::string(name(block))},
      {has_path || stem.starts_with('.'), "stem", "this cannot be the beginning of a file name",
       printable(stem)},
      {options.one_file && !stem.empty(), "name",
       "a single file always has the target's name: to choose the name of shards, pass a folder",
       printable(stem)},
      {options.experts != ExpertLayout::keep && names_are_given(options), "experts", needs_names},
      {!quantizes && !(quantize.include.empty() && quantize.exclude.empty()),
       quantize.include.empty() ? "exclude" : "include",
       "--include and --exclude (include=, exclude=) have no effect without --quantize "
       "(quantize=)"},
  });
  if (repacks(options)) check_repack(options);
  const bool has_importance = quantize.importance != nullptr;
  if (has_importance && (!quantizes || !container_of(options.format).holds_blocks())) {
    refuse_option("importance", "an importance matrix can be used only to quantize to a GGUF file",
                  printable(quantize.importance->path, 400));
  }
  const bool has_index = options.is_split && !container_of(options.format).index_suffix().empty();
  refuse_first({
      {options.is_split && (options.one_file || has_index), "is_split",
       "only GGUF files can be split without an index, and only into several files"},
      {options.dequantize && options.merge, "dequantize",
       "a merge always decodes quantized tensors: omit dequantize"},
      {options.shard_bytes_max == 0, "shard_bytes_max",
       "the size of a shard must be greater than 0"},
      {options.staging_bytes_max == 0, "staging_bytes_max",
       "the size of the staging pool must be greater than 0"},
  });
}

void add_error(Conversion& conversion, Finding finding) {
  finding.severity = Severity::error;
  conversion.plan.findings.push_back(std::move(finding));
}

// Returns the file that declares an encoding for the tensors of the catalog or of its first model.
// Returns an empty string if no file is reliable: other programs also write files with some of
// these names.
std::string_view certain_claim(const Catalog& catalog, const ModelFolder& folder) {
  const std::string_view file = claiming_file(folder);
  const bool is_certain = file == "config.json" || file == claim_name || may_hold_codes(catalog);
  return is_certain ? file : std::string_view();
}

// Adds an error if values are requested and a config declares an encoding that no tensor confirms,
// because the tensors may be codes.
void check_claim(Conversion& conversion, const ConvertOptions& options) {
  const Catalog& all = *conversion.plan.catalog;
  const Catalog& catalog = all.checkpoints().empty() ? all : *all.checkpoints().front();
  const QuantizedTensors& quantized = catalog.quantized();
  const bool casts = (options.dtype || options.merge) && may_hold_codes(catalog);
  const bool makes_numbers = options.dequantize || casts || !options.quantize.formats.empty();
  const bool has_codes = quantized.has_readable() || has_errors(quantized.findings());
  if (!makes_numbers || has_codes) return;
  const std::string_view file = certain_claim(catalog, options.folder);
  if (!file.empty()) add_error(conversion, unread_claim(file));
}

// Reports floats and complex values that loadstone cannot cast, and so leaves unchanged.
void tell_uncast(const Catalog& catalog, const ConvertOptions& options,
                 std::vector<Finding>& findings) {
  std::vector<std::string> names;
  for (std::uint32_t i = 0; i < catalog.tensors().size(); ++i) {
    const TensorInfo& tensor = catalog.tensors()[i];
    if (catalog.quantized().is_component(i) || !tensor.encoding.is_dtype() ||
        dtype_info(tensor.encoding.dtype()).has_casts) {
      continue;
    }
    if (options.dtype || is_foreign_float(tensor)) names.push_back(tensor.name);
  }
  if (names.empty()) return;
  std::string message = fmt::format(
      "this version of loadstone cannot cast F4, F6, FNUZ or complex tensors, and copies {} "
      "unchanged: {}",
      counted(names.size(), "tensor"), name_list(names));
  findings.push_back({.severity = Severity::warning,
                      .code = "convert.left_alone",
                      .sources = std::move(names),
                      .message = std::move(message)});
}

// Reports quantized tensors that --dtype leaves unchanged, because it never rounds components.
void tell_kept_codes(const Catalog& catalog, const ConvertOptions& options,
                     std::vector<Finding>& findings) {
  const bool quantizes = !options.quantize.formats.empty();
  if (!options.dtype || options.dequantize || options.merge || quantizes || repacks(options))
    return;
  std::vector<std::string> names;
  std::set<std::string_view> encodings;
  for (const QuantizedTensor& each : catalog.quantized().tensors()) {
    if (!each.is_readable()) continue;
    names.push_back(each.name);
    encodings.insert(each.encoding);
  }
  if (names.empty()) return;
  std::string message = fmt::format(
      "--dtype (dtype= in Python) does not decode quantized tensors: {} in {}",
      names.size() == 1 ? "1 tensor stays" : fmt::format("{} tensors stay", names.size()),
      fmt::join(encodings, ", "));
  findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.left_alone",
       .sources = std::move(names),
       .message = std::move(message),
       .suggestion = "pass --dequantize (dequantize=True in Python) to decode them"});
}

// If the request changes values, reports tensors that may be codes: scales without codes, and
// floats that loadstone cannot cast.
void tell_doubtful(const Catalog& catalog, const ConvertOptions& options,
                   std::vector<Finding>& findings) {
  const bool quantizes = !options.quantize.formats.empty();
  if (!options.dtype && !options.merge && !options.dequantize && !quantizes) return;
  for (const Finding& each : catalog.quantized().findings()) {
    const auto is_same = [&](const Finding& known) {
      return known.code == each.code && known.sources == each.sources;
    };
    if (each.code != "q.scale_unused" || std::ranges::any_of(findings, is_same)) continue;
    findings.push_back(each);
  }
  if (!options.merge) tell_uncast(catalog, options, findings);
  tell_kept_codes(catalog, options, findings);
}

// Checks for transforms of activations, which only the config declares. Adds an error and returns
// false if the output would lose them because its config is rewritten.
bool check_transforms(Conversion& conversion, const ConvertOptions& options, bool has_values) {
  const Catalog& catalog = *conversion.plan.catalog;
  const bool is_rewritten = has_values || !options.quantize.formats.empty() || repacks(options) ||
                            options.format != FileFormat::safetensors;
  if (!is_rewritten) return true;
  auto found = transform_finding(catalog);
  if (!found) found = scaled_activation_finding(catalog);
  if (!found) return true;
  add_error(conversion, *std::move(found));
  return false;
}

// Checks the config's claims about quantization, transforms and ties.
void check_claims(Conversion& conversion, const ConvertOptions& options, bool has_values) {
  if (check_transforms(conversion, options, has_values)) check_claim(conversion, options);
  tell_doubtful(*conversion.plan.catalog, options, conversion.plan.findings);
  for (Finding& finding : check_tied_shapes(*conversion.plan.catalog, options.folder.config)) {
    add_error(conversion, std::move(finding));
  }
}

// If shapes fit two encodings, records the actual encoding in the header's metadata.
void name_ambiguous(Conversion& conversion, bool is_decoded) {
  auto& metadata = conversion.metadata;
  std::map<std::string_view, std::set<std::string_view>> names;  // by metadata key
  for (const WrittenEncoding* const encoding : written_encodings()) {
    if (encoding->is_ambiguous != nullptr) names[encoding->metadata_key];
  }
  if (is_decoded) {
    std::erase_if(metadata, [&](const auto& each) { return names.contains(each.first); });
  }
  for (const PlannedTarget& target : conversion.plan.targets) {
    if (!target.quantization) continue;
    const WrittenEncoding& encoding = written_encoding(*target.quantization);
    if (encoding.is_ambiguous != nullptr && encoding.is_ambiguous(target.shape)) {
      names[encoding.metadata_key].insert(encoding.name);
    }
  }
  for (const auto& [key, encodings] : names) {
    // Readers would reject metadata that names several encodings, so none is recorded.
    if (encodings.size() != 1) continue;
    metadata.insert_or_assign(std::string(key),
                              MetadataValue{.value = std::string(*encodings.begin())});
  }
}

// Writes the metadata that are needed to interpret the output's tensors.
void settle_metadata(Conversion& conversion, const ConvertOptions& options, bool is_decoded) {
  if (container_of(conversion.format).holds_blocks()) add_folded_shapes(conversion);
  name_ambiguous(conversion, is_decoded);
  keep_layer_metadata(conversion, options, is_decoded || options.merge || repacks(options));
  if (auto finding = container_of(conversion.format).check_metadata(conversion)) {
    conversion.plan.findings.push_back(*std::move(finding));
  }
}

}  // namespace

// Keeps codes that are not encoded again, if the files can store them.
static void keep_codes(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
                       Choices& choices, Recipes& recipes) {
  if (options.dtype || options.dequantize) return;
  const bool asks_for_numbers = options.merge || !options.quantize.formats.empty();
  const auto stays = [&](const TargetRecipe& recipe) {
    if (choices.kept.contains(recipe.target)) return true;
    // Blocks stay blocks, and other codes do too unless the options request values.
    if (asks_for_numbers && !source_blocks(*catalog, recipe)) return false;
    return !choices.quantize.contains(recipe.target) && !choices.numbers.contains(recipe.target);
  };
  keep_blocks(*catalog, stays, recipes);
  if (!asks_for_numbers) choices.quantize = keep_nvfp4(catalog, recipes);
}

static Choices choose_formats(const Catalog& catalog, const ConvertOptions& options,
                              Conversion& conversion, Recipes& recipes,
                              std::vector<Finding>& findings) {
  widen_plain_fp8(catalog, recipes);
  Choices choices =
      container_of(options.format).choose(options, catalog, conversion.metadata, recipes, findings);
  if (!options.dtype && !options.dequantize) restore_plain_fp8(catalog, choices, recipes);
  return choices;
}

// Returns true if the output may keep blocks of the source.
static bool keeps_blocks(const ConvertOptions& options) {
  return container_of(options.format).holds_blocks() && !options.dtype && !options.dequantize &&
         !options.merge && options.quantize.formats.empty();
}

static Skeleton skeleton_of(const Recipes& recipes) {
  Skeleton skeleton;
  skeleton.targets.reserve(recipes.targets.size());
  for (const TargetRecipe& recipe : recipes.targets) {
    skeleton.targets.push_back(
        {.name = recipe.target, .shape = recipe.shape, .dtype = recipe.dtype});
  }
  return skeleton;
}

static void check_source(const Catalog& catalog, const ConvertOptions& options) {
  if (!options.merge && !catalog.checkpoints().empty()) {
    refuse_option("merge",
                  "there are several checkpoints, but no option specifies how to merge them");
  }
  // Rules rename the components of quantized tensors; recipes may also read decoded values.
  const bool moves_components =
      (!options.rules.empty() && (options.dequantize || !catalog.quantized().empty())) ||
      std::ranges::any_of(options.recipes.targets, [&](const TargetRecipe& recipe) {
        return has_component(catalog, recipe);
      });
  refuse_first({{moves_components && options.dequantize, "dequantize", needs_names},
                {moves_components && !options.quantize.formats.empty(), "quantize",
                 "the checkpoint is already quantized. One conversion cannot both rename its "
                 "stored tensors and quantize. Two conversions can, but the second rounds the "
                 "decoded values again"}});
}

static std::string usual_stem(const Catalog& catalog, std::string_view config) {
  if (is_adapter(catalog)) return std::string(adapter_stem);
  return is_config_of_diffusers(config) ? "diffusion_pytorch_model" : "model";
}

// Returns the options with the format for all tensors moved to the end. Also sets the config of the
// source or of the first merged model, which matters even if the source is a single file or the
// output has no config.
static ConvertOptions settled(const Catalog& catalog, ConvertOptions options) {
  std::ranges::stable_partition(options.quantize.formats,
                                [](const QuantizeFormat& each) { return !each.pattern.empty(); });
  if (!options.quantize.style) options.quantize.style = only_style(options.quantize);
  ModelFolder& folder = options.folder;
  if (!folder.config.empty() || !folder.files.empty()) return options;
  const auto& models = catalog.checkpoints();
  const Catalog& first = models.empty() ? catalog : *models.front();
  ModelFolder beside = claims_beside(first);
  folder.config = std::move(beside.config);
  folder.files = std::move(beside.files);
  if (folder.denied.empty()) folder.denied = std::move(beside.denied);
  return options;
}

static bool quantizes_any(const Plan& plan) {
  return std::ranges::any_of(
      plan.targets, [](const PlannedTarget& target) { return target.quantization.has_value(); });
}

// Records whether the output has codes and ties, because an existing config at the target must
// agree.
static void settle_config(Conversion& conversion, const ConvertOptions& options, bool has_values,
                          bool is_untied) {
  const Plan& plan = conversion.plan;
  const Catalog& catalog = *plan.catalog;
  const bool is_kept =
      !has_values && !options.merge &&
      (catalog.quantized().has_readable() || !certain_claim(catalog, options.folder).empty());
  conversion.has_codes = options.format == FileFormat::safetensors &&
                         (is_kept || !conversion.repacked.empty() || quantizes_any(plan));
  const std::string& config = options.folder.config;
  conversion.has_tie = !is_untied && (config.empty() || untied_head(plan, config).has_value());
}

// Reports what the output's configs lose or change compared with the source's configs.
static void tell_configs(Conversion& conversion, const ConvertOptions& options, bool has_decoded) {
  auto& findings = conversion.plan.findings;
  const bool is_new = options.merge || has_decoded || !conversion.repacked.empty() ||
                      options.format != FileFormat::safetensors || quantizes_any(conversion.plan);
  if (is_new) {
    tell_schemes(conversion, options, findings);
    tell_readers(conversion, options, findings);
    tell_unread_file(conversion, options, findings);
  } else if (names_are_given(options)) {
    tell_old_names(conversion, findings);
  }
}

// Raises findings about ignored extra states and lists to warnings, because every output loses
// them.
static void settle_findings(std::vector<Finding>& findings) {
  for (Finding& each : findings) {
    const bool is_ignored = each.code == "pt.ignored" || each.code == "dcp.ignored";
    if (is_ignored && !each.sources.empty()) each.severity = Severity::warning;
  }
  sort_findings(findings);
  // The plan and the conversion may both report the catalog's findings.
  const auto twice = std::ranges::unique(findings);
  findings.erase(twice.begin(), twice.end());
}

static Decoded reason_to_decode(const ConvertOptions& options) {
  if (options.merge) return Decoded::by_merge;
  return options.dequantize || options.quantize.formats.empty() ? Decoded::on_request
                                                                : Decoded::by_quantization;
}

static Conversion begin_conversion(const Catalog& catalog, const ConvertOptions& options) {
  Conversion conversion;
  conversion.one_file = options.one_file;
  conversion.is_split = options.is_split;
  conversion.stem =
      options.stem.empty() ? usual_stem(catalog, options.folder.config) : options.stem;
  conversion.format = options.format;
  conversion.require_lossless = options.require_lossless;
  return conversion;
}

static Conversion conversion_of(std::shared_ptr<const Catalog> catalog,
                                const ConvertOptions& given) {
  if (catalog == nullptr) refuse_option("catalog", "the catalog is null");
  check_options(given);
  const ConvertOptions options = settled(*catalog, given);
  check_source(*catalog, options);
  std::vector<Finding> findings;
  Conversion conversion = begin_conversion(*catalog, options);
  conversion.options = given_options(given);
  const Container& container = container_of(options.format);
  conversion.metadata = container.metadata(*catalog, options, findings);
  if (!keeps_blocks(options)) erase_importance(options.metadata, conversion.metadata);
  PlanOptions plan_options;
  plan_options.unexpected = options.unexpected;
  plan_options.strip_prefixes.emplace();  // empty: recipes already have the output's names
  plan_options.allow_non_finite = options.quantize.allow_non_finite;
  const bool is_decoded = decodes(*catalog, options);
  Values outputs = output_recipes(catalog, options, is_decoded, findings);
  plan_options.recipes = std::move(outputs.recipes);
  conversion.repacked = std::move(outputs.repacked);
  Choices choices;
  Recipes& recipes = plan_options.recipes;
  const bool quantizes = !options.quantize.formats.empty();
  if (quantizes) choices = choose_formats(*catalog, options, conversion, recipes, findings);
  if (repacks(options)) report_repacked(options, conversion.repacked, recipes, findings);
  if (container.holds_blocks()) keep_codes(catalog, options, choices, recipes);
  plan_options.quantize = std::move(choices.quantize);
  if (options.recipes.targets.empty()) {
    std::ranges::copy(drop_block_scales(*catalog, recipes), std::back_inserter(outputs.dropped));
  }
  std::vector<std::string>& known = plan_options.caller.known_sources;
  known = tensor_names(*catalog, outputs.dropped);
  // Mark the sources of errors as known, so that they are not also reported as unused.
  for (const Finding& finding : findings) {
    if (finding.severity != Severity::error) continue;
    known.insert(known.end(), finding.sources.begin(), finding.sources.end());
  }
  const Skeleton skeleton = skeleton_of(recipes);
  conversion.plan = Planner(std::move(catalog), skeleton, plan_options).run(SinkKind::files);
  Plan& plan = conversion.plan;
  plan.findings.insert(plan.findings.end(), findings.begin(), findings.end());
  // A caller's recipes can decode all codes even if no option requests it.
  const bool has_values = is_decoded || (plan.catalog->quantized().has_readable() &&
                                         conversion.repacked.empty() && !moves_codes(plan));
  check_claims(conversion, options, has_values);
  for (Finding& each : check_moved_codes(plan, conversion.repacked, options.dequantize)) {
    add_error(conversion, std::move(each));
  }
  SeparateExperts separate(plan.catalog, options);
  if (keeps_blocks(options)) {  // recipes yield values of tensors that cannot keep their codes
    const auto severity = names_are_given(options) ? Severity::warning : Severity::error;
    std::ranges::move(check_numbers(plan, severity, separate), std::back_inserter(plan.findings));
  }
  if (container.holds_blocks()) conversion.repacked = repacked_blocks(conversion);
  settle_metadata(conversion, options, has_values);
  lay_out(conversion, options);
  tell_quantized(conversion, choices, reason_to_decode(options), separate);
  if (options.require_lossless) tell_losses(conversion, separate);
  const bool has_decoded = has_values && plan.catalog->quantized().has_readable();
  settle_extras(conversion, options, given.folder, {has_decoded, outputs.unties});
  if (options.merge) tell_other_models(*plan.catalog, *options.merge, given.folder, plan.findings);
  settle_config(conversion, options, has_values, outputs.unties);
  tell_configs(conversion, options, has_decoded);
  choose_sizes(conversion, options);
  plan.bytes_to_read = conversion.bytes_to_read;
  plan.bytes_to_write = conversion.bytes_to_write;
  plan.peak_bytes = {{"cpu", conversion.peak_bytes}};
  settle_findings(plan.findings);
  return conversion;
}

Conversion make_conversion(std::shared_ptr<const Catalog> catalog, const ConvertOptions& options) {
  return only_errors([&] { return conversion_of(std::move(catalog), options); });
}

}  // namespace loadstone
