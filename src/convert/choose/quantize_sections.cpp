#include "convert/choose/quantize_sections.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/json_writer.h"
#include "base/text.h"
#include "codec/encode.h"
#include "convert/choose/module_wildcards.h"
#include "convert/choose/quantize_config.h"
#include "convert/choose/quantize_patterns.h"
#include "convert/experts.h"

namespace loadstone {

namespace {

struct Absent {};  // value of a member to omit
struct Raw {
  std::string_view json;
};
struct Json;
using Members = std::vector<std::pair<std::string, Json>>;
struct Json : std::variant<std::nullptr_t, bool, std::uint64_t, std::string_view, Raw, Absent,
                           std::vector<std::string>, std::vector<unsigned>, Members> {
  using variant::variant;
};

Json only_if(bool is_there, Json value) { return is_there ? std::move(value) : Json(Absent()); }
Json or_null(bool is_set, Json value) { return is_set ? std::move(value) : Json(nullptr); }

void write(JsonWriter& json, const Json& value) {
  const auto write_held = [&](const auto& held) {
    using Held = std::remove_cvref_t<decltype(held)>;
    if constexpr (std::is_same_v<Held, Members>) {
      json.begin_object();
      for (const auto& [key, member] : held) {
        if (std::holds_alternative<Absent>(member)) continue;
        json.key(key);
        write(json, member);
      }
      json.end_object();
    } else if constexpr (std::is_same_v<Held, Raw>) {
      json.raw(held.json);
    } else if constexpr (std::is_same_v<Held, std::nullptr_t>) {
      json.null();
    } else if constexpr (!std::is_same_v<Held, Absent>) {
      json.value(held);
    }
  };
  std::visit(write_held, value);
}

std::string text_of_config(const Members& members, unsigned indent) {
  JsonWriter json(indent, 8);
  write(json, members);
  return json.take();
}

// Returns the encodings of the quantized modules, in the plan's order.
std::vector<const WrittenEncoding*> encodings_of(const QuantizedModules& modules) {
  std::vector<const WrittenEncoding*> encodings;
  for (const auto& [name, quantization] : modules.quantized) {
    const WrittenEncoding* const encoding = &written_encoding(*quantization);
    if (std::ranges::find(encodings, encoding) == encodings.end()) encodings.push_back(encoding);
  }
  return encodings;
}

// Returns the targets of the group of modules with this encoding: names and patterns, or all linear
// layers if there is only one group. `ignore` has priority over targets.
std::vector<std::string> targets_of(const QuantizedModules& modules,
                                    const WrittenEncoding& encoding, bool is_mixed) {
  if (!is_mixed) return {"Linear"};
  std::vector<std::string> targets;
  std::vector<std::string> others = modules.others;
  for (const auto& [name, quantization] : modules.quantized) {
    std::vector<std::string>& names = quantization->encoding == encoding.name ? targets : others;
    names.push_back(name);
    if (auto usual = usual_module(name)) names.push_back(*std::move(usual));
  }
  return select_modules(targets, others).entries(targets);
}

// ---- ModelOpt

// Version of ModelOpt that writes this layout. Configs contain it next to the producer's name,
// which servers require.
constexpr std::string_view unified_version = "0.47.0";
constexpr std::string_view mixed_precision = "MIXED_PRECISION";

Members algorithm_rows(const UnifiedConfig& algorithm, bool with_kv_cache) {
  return {{"quant_algo", algorithm.algorithm},
          {"kv_cache_quant_algo", only_if(with_kv_cache, nullptr)},
          {"group_size", only_if(algorithm.group_size != 0, algorithm.group_size)},
          {"has_zero_point", only_if(algorithm.is_awq, false)},
          {"pre_quant_scale", only_if(algorithm.is_awq, false)}};  // true would need a calibration
}

Members number_rows(const WrittenEncoding& encoding, bool is_weight) {
  const UnifiedConfig& algorithm = encoding.unified;
  return {{"dynamic", false},
          {"num_bits", encoding.bits},
          {"type", encoding.code_type},
          {"group_size", only_if(algorithm.group_size != 0, algorithm.group_size)},
          {"strategy", only_if(is_weight && !algorithm.strategy.empty(), algorithm.strategy)}};
}

Members producer_rows() { return {{"name", "modelopt"}, {"version", unified_version}}; }

// Returns the module of the stack ("model.layers.0.mlp.experts") that contains an expert's module;
// empty for other modules.
std::string_view stack_of(std::string_view module) {
  constexpr std::string_view infix = ".experts.";
  const auto at = module.rfind(infix);
  if (at == module.npos) return {};
  const std::string_view expert = module.substr(at + infix.size());
  return is_digits(expert.substr(0, expert.find('.'))) ? module.substr(0, at + infix.size() - 1)
                                                       : std::string_view();
}

// Returns a row per module. Readers look up experts by the module that contains them and match no
// patterns, so one row replaces the rows of many experts with the same encoding.
Members layer_rows(const QuantizedModules& modules) {
  struct Stack {
    std::size_t modules = 0;
    const WrittenEncoding* encoding = nullptr;
    bool is_mixed = false;
    bool is_written = false;
  };
  std::map<std::string_view, Stack> stacks;
  for (const auto& [name, quantization] : modules.quantized) {
    Stack& stack = stacks[stack_of(name)];
    const WrittenEncoding* const encoding = &written_encoding(*quantization);
    stack.is_mixed |= stack.modules++ > 0 && stack.encoding != encoding;
    stack.encoding = encoding;
  }
  for (const std::string& name : modules.plain) stacks[stack_of(name)].is_mixed = true;
  stacks[{}].is_mixed = true;
  Members layers;
  for (const auto& [name, quantization] : modules.quantized) {
    Stack& stack = stacks[stack_of(name)];
    const bool is_one_row = !stack.is_mixed && stack.modules > listed_names_max;
    if (is_one_row && std::exchange(stack.is_written, true)) continue;
    layers.emplace_back(is_one_row ? stack_of(name) : name,
                        algorithm_rows(written_encoding(*quantization).unified, false));
  }
  return layers;
}

// Returns one group of modules per encoding.
Json unified_groups(const QuantizedModules& modules) {
  const auto encodings = encodings_of(modules);
  const bool is_mixed = encodings.size() > 1;
  Members groups;
  for (const WrittenEncoding* const encoding : encodings) {
    const Described described = encoding->unified.described;
    const bool has_weights = described != Described::nothing;
    const bool has_activations = described == Described::weights_and_activations;
    std::vector<std::string> targets = targets_of(modules, *encoding, is_mixed);
    std::ranges::sort(targets);
    groups.emplace_back(
        fmt::format("group_{}", groups.size()),
        Members{{"input_activations", only_if(has_activations, number_rows(*encoding, false))},
                {"weights", only_if(has_weights, number_rows(*encoding, true))},
                {"quant_algo", only_if(!has_weights, encoding->unified.algorithm)},
                {"targets", std::move(targets)}});
  }
  return only_if(is_mixed || encodings.front()->unified.has_groups, std::move(groups));
}

// ---- compressed-tensors

constexpr std::string_view compressed_version = "0.20.0";

Members scheme_rows(const WrittenEncoding& encoding, bool is_weight) {
  const CompressedConfig& scheme = encoding.compressed;
  const bool has_blocks = is_weight && scheme.strategy == "block";
  const unsigned group = is_weight ? scheme.group_size : (scheme.activations == "group" ? 128 : 0);
  const Json scale_dtype = or_null(is_weight && !scheme.scale_dtype.empty(), scheme.scale_dtype);
  return {{"actorder", nullptr},
          {"block_structure", or_null(has_blocks, std::vector<unsigned>{128, 128})},
          {"dynamic", !is_weight},
          {"group_size", or_null(group != 0, group)},
          {"num_bits", encoding.bits},
          {"observer", or_null(is_weight, "memoryless_minmax")},
          {"observer_kwargs", Members()},
          {"scale_dtype", scale_dtype},
          {"zp_dtype", scale_dtype},
          {"strategy", is_weight ? scheme.strategy : scheme.activations},
          {"symmetric", true},
          {"type", encoding.code_type}};
}

Members compressed_groups(const QuantizedModules& modules) {
  const auto encodings = encodings_of(modules);
  Members groups;
  for (const WrittenEncoding* const encoding : encodings) {
    const CompressedConfig& scheme = encoding->compressed;
    groups.emplace_back(fmt::format("group_{}", groups.size()),
                        Members{{"format", scheme.format},
                                {"input_activations", or_null(!scheme.activations.empty(),
                                                              scheme_rows(*encoding, false))},
                                {"output_activations", nullptr},
                                {"targets", targets_of(modules, *encoding, encodings.size() > 1)},
                                {"weights", scheme_rows(*encoding, true)}});
  }
  return groups;
}

// Returns entries for the plain modules under their names in the file and their loaded names.
std::vector<std::string> compressed_ignore(const QuantizedModules& modules) {
  const auto quantized = modules.quantized_names();
  auto ignore = select_plain(modules.plain, quantized).entries(modules.plain);
  for (const std::string& pattern : patterns_inside(modules.stacks, quantized)) {
    ignore.push_back("re:" + pattern);
  }
  return ignore;
}

// ---- bitsandbytes

// Returns the plain modules in the form that transformers matches: a suffix of a module's name, or
// a pattern for its prefix up to a dot. If a quantized module matches such a name, a pattern for
// the full name replaces it. Additional patterns match the names that the modules have after
// loading.
//
// For each plain module, also adds the outermost enclosing module without a quantized module,
// because the library may rename submodules (Mimi's "decoder_transformer" becomes a part of its
// "decoder"). Readers search for the added name anywhere in a module's name, so no quantized module
// may contain it.
std::vector<std::string> skipped_modules(const QuantizedModules& modules) {
  const std::vector<std::string> quantized = modules.quantized_names();
  std::map<std::string, bool> is_plain;
  std::set<std::string> around;
  std::vector<std::string> skipped = modules.plain;
  for (std::string& plain : skipped) {
    for (auto dot = plain.find('.'); dot != plain.npos; dot = plain.find('.', dot + 1)) {
      const auto [outer, is_new] = is_plain.try_emplace(plain.substr(0, dot));
      if (is_new) {
        outer->second = std::ranges::none_of(quantized, [&](const std::string& each) {
          return each.find(outer->first) != std::string::npos;
        });
      }
      if (!outer->second) continue;
      around.insert(outer->first);
      break;
    }
    const bool is_too_wide = std::ranges::any_of(modules.quantized, [&](const auto& each) {
      return each.first.ends_with(plain) || each.first.starts_with(plain + ".");
    });
    if (is_too_wide) plain = fmt::format("^{}$", plain);
  }
  skipped.insert(skipped.end(), around.begin(), around.end());
  const auto patterns = select_plain(modules.plain, quantized).patterns;
  skipped.insert(skipped.end(), patterns.begin(), patterns.end());
  return skipped;
}

}  // namespace

std::string unified_config(const QuantizedModules& modules) {
  const auto encodings = encodings_of(modules);
  Members rows;
  if (encodings.size() > 1) {
    rows = {{"quant_algo", mixed_precision},
            {"kv_cache_quant_algo", nullptr},
            {"quantized_layers", layer_rows(modules)}};
  } else {
    rows = algorithm_rows(encodings.front()->unified, true);
    rows.emplace_back("exclude_modules", summed_up(modules));
  }
  return text_of_config({{"producer", producer_rows()}, {"quantization", std::move(rows)}}, 4) +
         "\n";
}

std::string unified_section(const QuantizedModules& modules) {
  const auto encodings = encodings_of(modules);
  const bool is_mixed = encodings.size() > 1;
  return text_of_config(
      {{"config_groups", unified_groups(modules)},
       {"quantized_layers", only_if(is_mixed, layer_rows(modules))},
       {"ignore", summed_up(modules)},
       {"quant_algo", is_mixed ? mixed_precision : encodings.front()->unified.algorithm},
       {"producer", producer_rows()},
       {"quant_method", "modelopt"}},
      2);
}

std::string compressed_section(const QuantizedModules& modules) {
  const auto encodings = encodings_of(modules);
  const std::string_view format =
      encodings.size() > 1 ? "mixed-precision" : encodings.front()->compressed.format;
  return text_of_config({{"config_groups", compressed_groups(modules)},
                         {"format", format},
                         {"global_compression_ratio", nullptr},
                         {"ignore", compressed_ignore(modules)},
                         {"kv_cache_scheme", nullptr},
                         {"quant_method", "compressed-tensors"},
                         {"quantization_status", "compressed"},
                         {"transform_config", Members()},
                         {"version", compressed_version}},
                        2);
}

std::string section_of_bitsandbytes(const QuantizedModules& modules, Dtype dtype) {
  const WrittenEncoding& encoding = written_encoding(*modules.quantized.front().second);
  const bool is_eight = encoding.bits == 8;
  return text_of_config(
      {{"_load_in_4bit", !is_eight},
       {"_load_in_8bit", is_eight},
       {"bnb_4bit_compute_dtype", dtype_info(dtype).torch_name},
       {"bnb_4bit_quant_storage", "uint8"},
       {"bnb_4bit_quant_type", is_eight ? std::string_view("fp4") : encoding.name},
       {"bnb_4bit_use_double_quant", false},
       {"llm_int8_enable_fp32_cpu_offload", false},
       {"llm_int8_has_fp16_weight", false},
       {"llm_int8_skip_modules", skipped_modules(modules)},
       {"llm_int8_threshold", Raw{"6.0"}},  // transformers requires a float
       {"load_in_4bit", !is_eight},
       {"load_in_8bit", is_eight},
       {"quant_method", "bitsandbytes"}},
      2);
}

}  // namespace loadstone
