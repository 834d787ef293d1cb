
#include "convert/choose/quantize_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/named.h"
#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "base/unknown_word.h"
#include "base/words.h"
#include "boxes/merges.h"
#include "catalog/config_claim.h"
#include "catalog/config_file.h"
#include "codec/encode.h"
#include "convert/choose/gguf_mix.h"
#include "convert/choose/module_wildcards.h"
#include "convert/choose/quantize_sections.h"
#include "convert/experts.h"
#include "convert/json_text.h"
#include "convert/kept_blocks.h"
#include "convert/output_recipes.h"
#include "convert/repack.h"
#include "convert/tied_head.h"
#include "convert/values.h"
#include "convert/write/container.h"
#include "convert/write/extras.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

// Returns the module of a stack of experts ("model.layers.0.mlp.experts" for
// "model.layers.0.mlp.experts.gate_up_proj"); nullopt for single experts and other tensors.
std::optional<std::string> stack_module(const PlannedTarget& target) {
  constexpr std::string_view infix = ".experts.";
  const auto at = target.name.rfind(infix);
  if (at == std::string::npos || target.shape.rank() < 2 || target.name.ends_with("bias"))
    return {};
  const bool is_matrix = target.shape.rank() == 2 && target.name.ends_with(".weight");
  if (is_matrix || kind(target.dtype) != DtypeKind::floating) return {};
  return target.name.substr(0, at + infix.size() - 1);
}

void add_plain(const PlannedTarget& target, std::string module, std::vector<std::string>& plain) {
  if (!target.name.ends_with(".weight") && !stack_module(target)) return;
  auto usual = usual_module(module);
  plain.push_back(std::move(module));
  if (usual) plain.push_back(*std::move(usual));
}

// Adds stacks of experts without codes. A server builds one layer for a stack of experts, and looks
// the layer up by the stack's module or by the names that its experts' weights would have. `plain`:
// tensors without codes.
void add_stacks(const std::vector<const PlannedTarget*>& plain, QuantizedModules& modules) {
  std::set<std::string> quantized;
  for (const auto& [name, quantization] : modules.quantized) quantized.insert(name);
  std::set<std::string> parts;
  for (const PlannedTarget* const target : plain) {
    const auto module = stack_module(*target);
    if (!module) continue;
    const bool is_whole = !has_prefix(quantized, *module + ".");
    if (is_whole && parts.insert(*module).second) modules.stacks.push_back(*module);
    const bool is_down = target->name.find("down_proj", module->size()) != std::string::npos;
    const bool is_gate_up = target->name.find("gate_up_proj", module->size()) != std::string::npos;
    const std::uint64_t count = is_whole || target->shape.rank() < 3 ? 1 : target->shape[0];
    for (std::uint64_t expert = 0; expert < count; ++expert) {
      for (const ExpertRole role : expert_roles) {
        const bool is_other = role == ExpertRole::down ? is_gate_up : is_down;
        if (is_other && !is_whole) continue;
        parts.insert(fmt::format("{}.{}.{}", *module, expert, name(role, ExpertWords::usual)));
      }
    }
  }
  modules.plain.insert(modules.plain.end(), parts.begin(), parts.end());
}

// Adds linear layers that are in no file because their weights are tied.
void add_tied_modules(const Plan& plan, std::string_view config, QuantizedModules& modules) {
  for (std::string& module : tied_modules(plan, config)) {
    const auto is_quantized = [&](const auto& each) {
      return each.first == module || each.first.ends_with("." + module);
    };
    const bool is_known = std::ranges::find(modules.plain, module) != modules.plain.end();
    if (is_known || std::ranges::any_of(modules.quantized, is_quantized)) continue;
    modules.plain.push_back(std::move(module));
  }
}

// Returns the config with `section` as "quantization_config"; an empty section adds none. Removes
// everything else that quantization_claim() takes for a claim, also in the configs of the model's
// parts.
std::string with_section(const std::string& config, const std::string& section) {
  constexpr std::string_view ours = "quantization_config";
  // Keep the first one, so that the section replaces it in place.
  bool is_kept = !section.empty();
  const auto drops = [&](std::string_view key, unsigned level) {
    if (std::ranges::find(quantization_details, key) != quantization_details.end()) return true;
    if (std::ranges::find(quantization_members, key) == quantization_members.end()) return false;
    return key != ours || level > 0 || !std::exchange(is_kept, false);
  };
  const std::string rest = without_members(config, drops, config_depth_max);
  return section.empty() ? rest : with_member(rest, ours, section);
}

// Returns true if the output keeps plain tensors of a narrow dtype (FP8).
bool keeps(const Plan& plan, Dtype narrow) {
  return std::ranges::any_of(plan.targets, [&](const PlannedTarget& target) {
    return !target.quantization && target.dtype == narrow;
  });
}

// Returns the dtype of most values in unquantized floating-point tensors of 16 bits or more;
// nullopt if the plan has no such tensor.
std::optional<Dtype> main_dtype(const Plan& plan) {
  std::array<std::uint64_t, dtype_count> counts = {};
  for (const PlannedTarget& target : plan.targets) {
    if (target.quantization || !is_wide_float(target.dtype) ||
        has_component(*plan.catalog, target.recipe)) {
      continue;
    }
    counts[static_cast<std::size_t>(target.dtype)] += target.shape.numel().value_or(0);
  }
  const auto most = std::ranges::max_element(counts);
  if (*most == 0) return std::nullopt;
  return static_cast<Dtype>(most - counts.begin());
}

// Returns true if a plain floating-point tensor of the output is decoded, or if none of its sources
// has its dtype.
bool changes_dtype(const Plan& plan) {
  return std::ranges::any_of(plan.targets, [&](const PlannedTarget& target) {
    if (target.quantization || !is_wide_float(target.dtype)) return false;
    bool is_decoded = false;
    bool is_cast = false;
    bool is_kept = false;
    for_each_box(target.recipe, [&](const Box& box) {
      const Encoding before = plan.catalog->tensors()[box.source].encoding;
      is_decoded |= box.decoding != no_decoding;
      (before == Encoding(target.dtype) ? is_kept : is_cast) = true;
    });
    return is_decoded || (is_cast && !is_kept);
  });
}

// Returns the config with main_dtype() as "dtype" and "torch_dtype", also in the configs of the
// model's parts. The config is unchanged if the plan has no such dtype or the config has no such
// member.
std::string with_dtype_of(const Plan& plan, std::string_view config) {
  const auto dtype = main_dtype(plan);
  if (!dtype) return std::string(config);
  return with_changes(
      config, [&](std::string_view key, std::string_view value) -> std::optional<std::string> {
        // A quantization scheme's own dtype has a different meaning, so it stays.
        const bool is_scheme =
            std::ranges::find(quantization_members, key) != quantization_members.end();
        if (is_scheme) return std::string(value);
        if (key != "dtype" && key != "torch_dtype") return std::nullopt;
        constexpr std::string_view prefix = "torch.";
        std::string_view text = value;
        if (!text.starts_with('"') || !text.ends_with('"')) return std::nullopt;
        text = text.substr(1, text.size() - 2);
        const bool has_prefix = text.starts_with(prefix);
        if (has_prefix) text.remove_prefix(prefix.size());
        const auto declared = parse_dtype(text);
        if (!declared || kind(*declared) != DtypeKind::floating) return std::nullopt;
        if (!is_wide_float(*declared) && keeps(plan, *declared)) return std::nullopt;
        std::string name = has_prefix ? "\"torch." : "\"";
        return name.append(dtype_info(*dtype).torch_name) + '"';
      });
}

}  // namespace

std::vector<std::string> QuantizedModules::quantized_names() const {
  std::vector<std::string> names;
  for (const auto& [name, quantization] : quantized) {
    names.push_back(name);
    if (auto usual = usual_module(name)) names.push_back(*std::move(usual));
  }
  return names;
}

QuantizedModules quantized_modules(const Plan& plan, const std::vector<RepackedTensor>& repacked) {
  QuantizedModules modules;
  for (const RepackedTensor& tensor : repacked) {
    modules.quantized.emplace_back(module_of(tensor.name), &tensor.quantization);
  }
  const std::set<std::string_view> components = repacked_targets(repacked);
  std::vector<const PlannedTarget*> plain;
  for (const PlannedTarget& target : plan.targets) {
    if (components.contains(target.name)) continue;
    std::string module(module_of(target.name));
    if (target.quantization) {
      modules.quantized.emplace_back(std::move(module), &*target.quantization);
    } else if (target.shape.rank() >= 2) {
      add_plain(target, std::move(module), modules.plain);
      plain.push_back(&target);
    } else if (target.name.ends_with(".weight")) {
      modules.others.push_back(std::move(module));
    }
  }
  add_stacks(plain, modules);
  return modules;
}

// Returns "quantization_config" for the plan; empty if nothing is quantized.
static std::string section_of(const Plan& plan, const QuantizedModules& modules,
                              std::optional<QuantizeStyle> style) {
  if (modules.quantized.empty()) return {};
  if (written_encoding(*modules.quantized.front().second).is_bitsandbytes()) {
    const auto first = std::ranges::find_if(
        plan.targets, [](const PlannedTarget& target) { return target.quantization.has_value(); });
    return section_of_bitsandbytes(modules, first->dtype);
  }
  return style == QuantizeStyle::compressed_tensors ? compressed_section(modules)
                                                    : unified_section(modules);
}

void settle_extras(Conversion& conversion, const ConvertOptions& options, const ModelFolder& folder,
                   ConfigChanges changes) {
  Plan& plan = conversion.plan;
  tell_left(folder, options.folder.denied, *plan.catalog, plan.findings);
  if (options.format != FileFormat::safetensors) return;
  std::string& config = conversion.config;
  config = options.folder.config;
  if (!config.empty()) check_config(config, "config.json");
  QuantizedModules modules = quantized_modules(plan, conversion.repacked);
  add_tied_modules(plan, config, modules);
  const std::string section = section_of(plan, modules, options.quantize.style);
  const bool is_changed = !section.empty() || changes.is_decoded;
  const bool has_config = !folder.config.empty() || options.one_file;
  if (is_changed) config = with_section(has_config && !config.empty() ? config : "{}\n", section);
  if (!config.empty() && (options.dtype || changes_dtype(plan))) {
    config = with_dtype_of(plan, config);
  }
  if (!config.empty() && changes.is_untied) config = untied_config(config);
  if (options.one_file) return;
  std::vector<ExtraFile>& files = conversion.extras;
  files = folder.files;
  if (is_changed) drop_claims(files, plan.findings);
  if (string_member(section, "quant_method") == "modelopt") {
    files.push_back({.name = std::string(claim_name), .text = unified_config(modules)});
  }
  if (has_config || is_changed) files.push_back({.name = "config.json", .text = config});
  std::ranges::sort(files, {}, &ExtraFile::name);
}

std::string_view name(QuantizeStyle style) noexcept {
  return name_among({"modelopt", "compressed-tensors", "gguf"}, style);
}

std::string_view module_of(std::string_view name) noexcept {
  constexpr std::string_view weight = ".weight";
  return name.ends_with(weight) ? name.substr(0, name.size() - weight.size()) : name;
}

NamingStyle naming_style(const WrittenEncoding& encoding, QuantizeStyle style) noexcept {
  if (encoding.is_bitsandbytes()) return NamingStyle::bnb;
  if (style == QuantizeStyle::gguf) return NamingStyle::gguf;
  return style == QuantizeStyle::unified ? NamingStyle::unified : NamingStyle::compressed;
}

const ComponentName& component_of(const WrittenEncoding& encoding, QuantizeStyle style,
                                  std::string_view component) {
  const ComponentName* const found =
      find_component(encoding, naming_style(encoding, style), component);
  if (found == nullptr) {
    throw Error("internal", "a component has no name in this style",
                {.found = std::string(component)});
  }
  return *found;
}

std::string component_name(const std::string& target, std::size_t part, std::string_view suffix) {
  if (target.ends_with(".weight")) return fmt::format("{}.{}", module_of(target), suffix);
  return part == 0 ? target : fmt::format("{}_{}", target, suffix);
}

std::string_view name(QuantizeMode mode) noexcept {
  return name_among({"exact", "modelopt-compat"}, mode);
}

std::optional<QuantizeMode> quantize_mode(std::string_view text) noexcept {
  return from_name<QuantizeMode>(text);
}

Quantization parse_quantization(std::string_view text, QuantizeMode mode, FileFormat format) {
  return only_errors([&] {
    Quantization quantization;
    const auto colon = text.find(':');
    const std::string asked = lowered(text.substr(0, colon));
    quantization.encoding = format == FileFormat::gguf ? name_in_gguf(asked) : asked;
    const WrittenEncoding* const encoding = find_written_encoding(quantization.encoding);
    const bool is_format = container_of(format).is_format(quantization.encoding);
    if (encoding == nullptr && !is_format && quantization.encoding != "none") {
      std::vector<std::string> known = written_encoding_names();
      known.emplace_back("none");
      if (find_mix(quantization.encoding) != nullptr) {
        refuse_option("quantize", "only GGUF files can store this mix of types", printable(text),
                      "a TARGET that ends in .gguf");
      }
      if (format == FileFormat::gguf) {
        for (const Mix& mix : mixes()) {
          if (std::ranges::count(known, mix.name) == 0) known.emplace_back(mix.name);
        }
      }
      refuse_option("quantize", unknown_word("encoding", quantization.encoding, known));
    }
    if (mode != QuantizeMode::exact && is_format) {
      refuse_option("mode", "a mode with ModelOpt's exact bytes is not available for GGUF files",
                    printable(name(mode)), "exact");
    }
    if (colon != std::string_view::npos) {
      const std::string_view digits = text.substr(colon + 1);
      const auto [end, problem] =
          std::from_chars(digits.data(), digits.data() + digits.size(), quantization.block_size);
      const bool has_blocks = encoding != nullptr && encoding->takes_block_size;
      if (problem != std::errc() || end != digits.data() + digits.size() || !has_blocks) {
        refuse_option("quantize", "the encoding does not support this block size", printable(text),
                      "nf4:64");
      }
    }
    if (mode == QuantizeMode::exact || encoding == nullptr) return quantization;
    if (encoding->unified_names.empty()) {
      refuse_option(
          "mode",
          fmt::format("{} is an encoding of {}, not of ModelOpt, so loadstone cannot write "
                      "ModelOpt's exact bytes",
                      quantization.encoding,
                      encoding->is_gguf()           ? "GGUF"
                      : encoding->is_bitsandbytes() ? "bitsandbytes"
                                                    : "compressed-tensors"),
          printable(name(mode)), "exact");
    }
    quantization.dialect = encoding->exported_dialect;
    quantization.exact_first = false;
    return quantization;
  });
}

std::optional<QuantizeStyle> only_style(const QuantizeOptions& options) {
  const bool is_compressed = std::ranges::any_of(options.formats, [](const auto& format) {
    const WrittenEncoding* const found = find_written_encoding(format.quantization.encoding);
    return found != nullptr && found->unified_names.empty() && !found->compressed_names.empty();
  });
  return is_compressed ? std::optional(QuantizeStyle::compressed_tensors) : std::nullopt;
}

void check_style(const QuantizeOptions& options) {
  const WrittenEncoding* first = nullptr;
  for (const QuantizeFormat& format : options.formats) {
    if (format.quantization.encoding == "none") continue;
    const WrittenEncoding* const blocks = find_written_encoding(format.quantization.encoding);
    if (blocks != nullptr && blocks->is_gguf()) {
      refuse_option("quantize",
                    "only GGUF files can store GGUF blocks: pass a TARGET that ends in .gguf",
                    printable(blocks->name), "NAME.gguf");
    }
    QuantizedLayout form;
    if (auto problem = prepare_quantization(format.quantization, {256, 256}, Dtype::bf16, form)) {
      refuse_option(
          "quantize", std::move(problem->message),
          printable(problem->found.empty() ? format.quantization.encoding : problem->found),
          std::move(problem->expected));
    }
    const WrittenEncoding& encoding = written_encoding(format.quantization);
    if (format.quantization.nested) {
      refuse_option("quantize", "loadstone cannot write nested scales to files",
                    printable(encoding.name));
    }
    const QuantizeStyle style = options.style.value_or(QuantizeStyle::unified);
    if (options.style && encoding.is_bitsandbytes()) {
      refuse_option(
          "quantize",
          fmt::format("{} does not support the style {}, only that of bitsandbytes: omit the style",
                      encoding.name, name(style)),
          printable(name(style)), fmt::format("no style for {}", encoding.name));
    }
    const auto holds = [&](QuantizeStyle known) {
      return !encoding.names(naming_style(encoding, known)).empty();
    };
    if (!holds(style)) {
      refuse_option(
          "quantize",
          fmt::format("files of the style {} cannot store {}", name(style), encoding.name),
          printable(encoding.name), "style " + either(names_of<QuantizeStyle>(holds)));
    }
    if (first == nullptr) first = &encoding;
    if (first != &encoding && (encoding.is_bitsandbytes() || first->is_bitsandbytes())) {
      refuse_option("quantize", "a bitsandbytes config can declare only one encoding",
                    printable(encoding.name), std::string(first->name));
    }
  }
}

std::vector<OutputTensor> output_tensors(const Conversion& conversion, const PlannedTarget& target,
                                         QuantizeStyle style) {
  std::vector<OutputTensor> tensors;
  if (!target.quantization) {
    StoredType type = stored_type(conversion, target);
    tensors.push_back({.name = target.name,
                       .shape = std::move(type.shape),
                       .encoding = type.encoding,
                       .constant = target.recipe.constant});
    return tensors;
  }
  const Quantization& quantization = *target.quantization;
  const auto parts = quantized_parts(quantization, target.shape, target.dtype);
  const WrittenEncoding& encoding = written_encoding(quantization);
  for (std::uint32_t i = 0; i < parts.size(); ++i) {
    const ComponentName& named = component_of(encoding, style, parts[i].name);
    tensors.push_back({.part = i,
                       .name = component_name(target.name, i, named.suffix),
                       .shape = shape_in_file(named.shape, parts[i].shape),
                       .encoding = parts[i].dtype,
                       .is_inverted = named.is_inverted});
  }
  if (encoding.is_gguf()) {
    QuantizedLayout form;
    static_cast<void>(prepare_quantization(quantization, target.shape, target.dtype, form));
    tensors[0].shape = target.shape;
    tensors[0].encoding = form.block;
  }
  if (encoding.constants == nullptr) return tensors;
  for (auto& constant : encoding.constants(quantization, target.shape, target.dtype)) {
    tensors.push_back({.name = fmt::format("{}.{}", module_of(target.name), constant.suffix),
                       .shape = std::move(constant.shape),
                       .encoding = constant.dtype,
                       .constant = std::move(constant.bytes)});
  }
  return tensors;
}

}  // namespace loadstone
