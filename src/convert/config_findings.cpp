#include "convert/config_findings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/json_dom.h"
#include "base/pattern.h"
#include "base/python_json.h"
#include "base/python_pattern.h"
#include "base/text.h"
#include "base/words.h"
#include "boxes/decodings.h"
#include "catalog/config_sections.h"
#include "codec/activation_scheme.h"
#include "codec/companions.h"
#include "codec/encode.h"
#include "convert/choose/gguf_image.h"
#include "convert/choose/readers.h"
#include "convert/json_text.h"
#include "convert/repack.h"
#include "convert/write/extras.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

struct Scheme {
  std::string numbers;  // format of the values: "8-bit float, dynamic", or "none"
  std::string extent;   // values per scale: "token", "group of 128"; empty: not declared

  [[nodiscard]] bool agrees(const Scheme& other) const {
    const bool may_differ = extent.empty() || other.extent.empty();
    return numbers == other.numbers && (may_differ || extent == other.extent);
  }
  [[nodiscard]] std::string text() const {
    return extent.empty() ? numbers : fmt::format("{}, per {}", numbers, extent);
  }
};

struct Declared {
  std::vector<Scheme> activations;  // without duplicates; empty: not declared
  std::string cache;                // empty: not quantized
};

template <typename Value>
Value member_or(const dom::object& object, std::string_view key, Value otherwise) {
  Value value{};
  return object[key].get(value) == simdjson::SUCCESS ? value : otherwise;
}

std::string text_at(const dom::object& object, std::string_view key) {
  return std::string(member_or(object, key, std::string_view()));
}

// Reads a scheme of compressed-tensors and fills in the library's defaults.
Scheme scheme_of(const dom::element& value) {
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS) return {std::string(no_scheme), {}};
  const auto bits = member_or<std::int64_t>(object, "num_bits", 8);
  const auto group = member_or<std::int64_t>(object, "group_size", 0);
  const bool is_dynamic = member_or(object, "dynamic", false);
  const bool is_symmetric = member_or(object, "symmetric", true);
  const auto or_else = [](std::string text, std::string_view other) {
    return text.empty() ? std::string(other) : text;
  };
  Scheme scheme;
  scheme.numbers =
      fmt::format("{}-bit {}, {}{}", bits, or_else(text_at(object, "type"), "int"),
                  or_else(text_at(object, "dynamic"), is_dynamic ? "dynamic" : "static"),
                  is_symmetric ? "" : ", asymmetric");
  scheme.extent = or_else(text_at(object, "strategy"), group > 0 ? "group" : "tensor");
  if (group > 0) scheme.extent += fmt::format(" of {}", group);
  return scheme;
}

void add(Declared& declared, Scheme scheme) {
  const auto is_same = [&](const Scheme& each) { return each.text() == scheme.text(); };
  if (std::ranges::none_of(declared.activations, is_same)) {
    declared.activations.push_back(std::move(scheme));
  }
}

void add_algorithm(Declared& declared, const std::string& name) {
  if (const auto* known = activation_scheme(lowered(name))) {
    add(declared, {std::string(known->numbers), std::string(known->extent)});
  }
}

void add_section(Declared& declared, const dom::object& section) {
  dom::element cache;
  if (section["kv_cache_scheme"].get(cache) == simdjson::SUCCESS && cache.is_object()) {
    declared.cache = "kv_cache_scheme: " + scheme_of(cache).text();
  }
  const std::string of_cache = text_at(section, "kv_cache_quant_algo");
  if (declared.cache.empty() && !of_cache.empty() && lowered(of_cache) != no_scheme) {
    declared.cache = "kv_cache_quant_algo: " + of_cache;
  }
  const std::string algorithm = text_at(section, "quant_algo");
  const std::string scheme = text_at(section, "activation_scheme");
  dom::object parts;
  if (!algorithm.empty()) {
    add_algorithm(declared, algorithm);
    if (section["quantized_layers"].get(parts) != simdjson::SUCCESS) return;
    for (const auto layer : parts) {
      dom::object each;
      if (layer.value.get(each) == simdjson::SUCCESS) {
        add_algorithm(declared, text_at(each, "quant_algo"));
      }
    }
  } else if (!scheme.empty()) {
    add(declared, {"8-bit float, " + scheme, {}});
  } else if (section["config_groups"].get(parts) == simdjson::SUCCESS) {
    for (const auto group : parts) {
      dom::element weights;
      if (group.value["weights"].get(weights) != simdjson::SUCCESS || !weights.is_object())
        continue;
      dom::element activations;
      const bool has_any = group.value["input_activations"].get(activations) == simdjson::SUCCESS;
      add(declared, has_any ? scheme_of(activations) : Scheme{std::string(no_scheme), {}});
    }
  } else if (text_at(section, "quant_method") == "fbgemm_fp8") {
    add_algorithm(declared, "fbgemm_fp8");
  }
}

Declared declared_in(const std::string& config) {
  Declared declared;
  dom::parser parser;
  dom::element root;
  if (parsed_json(parser, python_json(config).text).get(root) != simdjson::SUCCESS) return declared;
  for_each_section(root, [&](const dom::element& section) {
    if (section.is_object()) add_section(declared, section.get_object());
  });
  return declared;
}

// Returns the schemes that config.json declares, completed by ModelOpt's own config file.
Declared declared_in(const ModelFolder& folder, WritableStorage& storage) {
  Declared declared = declared_in(folder.config);
  for (const ExtraFile& file : folder.files) {
    if (file.name != claim_name) continue;
    Declared other = declared_in(text_of(file, storage));
    if (declared.activations.empty()) declared.activations = std::move(other.activations);
    if (declared.cache.empty()) declared.cache = std::move(other.cache);
  }
  return declared;
}

bool agree(const std::vector<Scheme>& first, const std::vector<Scheme>& second) {
  const auto covers = [](const std::vector<Scheme>& all, const std::vector<Scheme>& some) {
    return std::ranges::all_of(some, [&](const Scheme& scheme) {
      return std::ranges::any_of(all, [&](const Scheme& each) { return each.agrees(scheme); });
    });
  };
  return covers(first, second) && covers(second, first);
}

std::string schemes_text(const std::vector<Scheme>& schemes) {
  std::vector<std::string> texts;
  std::ranges::transform(schemes, std::back_inserter(texts), &Scheme::text);
  return fmt::format("{}", fmt::join(texts, "; "));
}

// Returns the names of the scales that no tensor of the output has.
std::vector<std::string> lost_scales(const Plan& plan, ScalesOf kind) {
  const Catalog& catalog = *plan.catalog;
  std::vector<bool> is_used(catalog.tensors().size());
  for (const PlannedTarget& target : plan.targets) {
    for (const Box& box : target.recipe.boxes) is_used[box.source] = true;
  }
  std::vector<std::string> names;
  for (std::uint32_t i = 0; i < is_used.size(); ++i) {
    const std::string& name = catalog.tensors()[i].name;
    if (is_used[i] || !catalog.quantized().is_companion(i) || scales_of(name) != kind) continue;
    names.push_back(name);
  }
  return names;
}

void tell(std::string message, std::string_view of, const std::vector<std::string>& scales,
          std::vector<Finding>& findings) {
  if (message.empty() && scales.empty()) return;
  if (!scales.empty()) {
    message +=
        fmt::format("{}the output omits {} of {}: {}", message.empty() ? "" : "; ",
                    counted(scales.size(), "scale"), of, name_list(scales, scales.size(), 2));
  }
  findings.push_back({.severity = Severity::warning,
                      .code = "convert.activations",
                      .target = scales.empty() ? std::string() : scales.front(),
                      .message = std::move(message)});
}

void tell_cache(const std::vector<Declared>& models, const std::vector<std::string>& scales,
                std::vector<Finding>& findings) {
  const auto model =
      std::ranges::find_if(models, [](const Declared& each) { return !each.cache.empty(); });
  std::string message;
  if (model != models.end()) {
    message = fmt::format("the source declares a quantized KV cache ({}), but the output does not",
                          printable(model->cache));
  }
  tell(std::move(message), "the KV cache", scales, findings);
}

// Keys of config members that are lists of module names, or objects whose keys are module names.
constexpr std::string_view list_keys =
    "ignore targets exclude_modules modules_to_not_convert exclude ignored_layers ignored_modules "
    "llm_int8_skip_modules dynamic quantized_layers modules_in_block_to_quantize";

// One list of modules in a config, and its key. Lists with the same key have the same purpose.
struct List {
  std::string key;
  std::vector<std::string> entries;
};

std::string wildcard(std::string_view text) {
  std::string pattern;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '*') {
      pattern += ".*";
      // Skip the dot of a ".*" that comes from a regular expression.
    } else if (text.substr(i, 2) != ".*") {
      pattern += re2::RE2::QuoteMeta(piece(text.substr(i, 1)));
    }
  }
  return pattern + "$";
}

using Place = std::pair<std::size_t, std::size_t>;  // index of a list, index of its entry

// Finds the entries of all lists that match a module. Applies the matching rules of all libraries:
// an entry is an expression ("re:", "-:", "+:" or special characters), a pattern with "*", or a
// name with everything inside it. Every change of the selection counts, regardless of the library
// that reads the list. In contrast, catalog/plain_lists.h, which reports wrong lists, applies the
// rule of each library and skips lists of other libraries.
class Entries {
 public:
  explicit Entries(const std::vector<List>& lists) {
    for (std::size_t i = 0; i < lists.size(); ++i) {
      for (std::size_t k = 0; k < lists[i].entries.size(); ++k) add(lists[i].entries[k], {i, k});
    }
  }

  // Returns the matching entries. Uses lookups instead of a scan, because a config may list as many
  // modules as the model has.
  [[nodiscard]] std::set<Place> find(std::string_view module) const {
    std::set<Place> found;
    for (std::size_t begin = 0; begin < module.size(); ++begin) {
      if (begin > 0 && module[begin - 1] != '.') continue;
      for (std::size_t end = begin; end < module.size();) {
        end = std::min(module.find('.', end + 1), module.size());
        const auto known = names_.find(module.substr(begin, end - begin));
        if (known != names_.end()) found.insert(known->second.begin(), known->second.end());
      }
    }
    for (const auto& [pattern, place] : patterns_) {
      if (is_in(*pattern, module)) found.insert(place);
    }
    return found;
  }

 private:
  // Adds an entry. Skips entries that readers also reject, and expressions that RE2 does not
  // support.
  void add(std::string_view name, Place place) {
    bool is_expression = name.find_first_of("\\()[]^$|+") != name.npos;
    for (const std::string_view prefix : {"re:", "-:", "+:"}) {
      if (!name.starts_with(prefix)) continue;
      name.remove_prefix(prefix.size());
      is_expression = true;
    }
    if (!is_expression && name.find('*') == name.npos) {
      names_[name].push_back(place);
      return;
    }
    try {
      const std::string source =
          is_expression ? re2_of_python(name, "plan.pattern", "config") : wildcard(name);
      patterns_.emplace_back(
          compile_pattern("^(?:" + source + ")", "plan.pattern", "config", pattern_memory(1)),
          place);
    } catch (const Error&) {
      return;
    }
  }

  std::map<std::string_view, std::vector<Place>> names_;
  std::vector<std::pair<Pattern, Place>> patterns_;
};

void add_entries(std::vector<std::string>& entries, const dom::element& value) {
  std::string_view text;
  if (value.get(text) == simdjson::SUCCESS && !text.empty()) entries.emplace_back(text);
  if (!value.is_array()) return;
  for (const dom::element item : value.get_array()) add_entries(entries, item);
}

void add_lists(std::vector<List>& lists, const dom::element& value) {
  if (value.is_array()) {
    for (const dom::element item : value.get_array()) add_lists(lists, item);
  }
  if (!value.is_object()) return;
  for (const auto field : value.get_object()) {
    const std::string key(field.key);
    if (!is_word(key, list_keys)) {
      add_lists(lists, field.value);
    } else if (field.value.is_object()) {  // an object whose keys are names
      for (const auto each : field.value.get_object()) {
        lists.push_back({key, {std::string(each.key)}});
      }
    } else {
      add_entries(lists.emplace_back(List{key, {}}).entries, field.value);
    }
  }
}

std::vector<List> lists_in(const ExtraFile& file, WritableStorage& storage) {
  std::vector<List> lists;
  dom::parser parser;
  dom::element root;
  if (parsed_json(parser, python_json(text_of(file, storage)).text).get(root) != simdjson::SUCCESS)
    return lists;
  if (is_claim(file.name) && file.name != claim_name) add_lists(lists, root);
  for_each_section(root, [&](const dom::element& section) { add_lists(lists, section); });
  return lists;
}

std::string_view module_around(std::string_view tensor) {
  return tensor.substr(0, tensor.rfind('.'));
}

// Pairs of a source's module and its name in the output, if rules rename the module.
using Renamed = std::set<std::pair<std::string_view, std::string_view>>;

Renamed renamed_modules(const Plan& plan) {
  Renamed renamed;
  for (const PlannedTarget& target : plan.targets) {
    const std::string_view after = module_around(target.name);
    for (const std::uint32_t source : sources_of(target.recipe, plan.decodings)) {
      const std::string_view before = module_around(plan.catalog->tensors()[source].name);
      if (before != after) renamed.emplace(before, after);
    }
  }
  return renamed;
}

bool selects(const std::set<Place>& found, std::size_t list) {
  const auto first = found.lower_bound({list, 0});
  return first != found.end() && first->first == list;
}

// Returns the entries, by the key of their list, that select a module only under its old name or
// only under its new name.
std::map<std::string_view, std::set<std::string>> old_entries(const std::vector<List>& lists,
                                                              const Renamed& renamed) {
  std::map<std::string_view, std::set<std::string>> old;
  const Entries entries(lists);
  for (const auto& [before, after] : renamed) {
    const std::set<Place> first = entries.find(before);
    const std::set<Place> second = entries.find(after);
    std::vector<Place> only;  // entries that match only one of the names
    std::ranges::set_symmetric_difference(first, second, std::back_inserter(only));
    for (const auto& [list, entry] : only) {
      if (selects(first, list) == selects(second, list)) continue;
      old[lists[list].key].insert(lists[list].entries[entry]);
    }
  }
  return old;
}

}  // namespace

void tell_schemes(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings) {
  const Plan& plan = conversion.plan;
  WritableStorage& storage = plan.catalog->storage().writable();
  std::vector<Declared> models = {declared_in(source.folder, storage)};
  const auto& checkpoints = plan.catalog->checkpoints();
  for (std::size_t i = 1; i < checkpoints.size(); ++i) {
    models.push_back(declared_in(claims_beside(*checkpoints[i]), storage));
  }
  tell_cache(models, lost_scales(plan, ScalesOf::cache), findings);
  if (!conversion.has_codes) return;
  const auto scales = lost_scales(plan, ScalesOf::activations);
  std::string message;
  if (repacks(source) && !conversion.one_file) {
    const auto& before = models.front().activations;
    const auto after = declared_in(conversion.config).activations;
    if (!before.empty() && !after.empty() && !agree(before, after)) {
      message = fmt::format(
          "the config of the output declares a different scheme for activations: {} in the source, "
          "{} in the output",
          printable(schemes_text(before)), printable(schemes_text(after)));
    }
  }
  tell(std::move(message), "activations", scales, findings);
}

static bool is_of_diffusers(const Conversion& conversion, const ConvertOptions& source) {
  const Catalog& catalog = *conversion.plan.catalog;
  return is_config_of_diffusers(source.folder.config) ||
         recognised_image_model(catalog) != nullptr || has_unfused_names(catalog);
}

void tell_readers(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings) {
  bool is_compressible = true;  // both styles store all encodings
  std::size_t count = 0;
  for (const PlannedTarget& target : conversion.plan.targets) {
    if (!target.quantization) continue;
    const WrittenEncoding& written = written_encoding(*target.quantization);
    is_compressible = is_compressible && !written.compressed_names.empty();
    count += written.unified_names.empty() && !conversion.one_file ? 0 : 1;
  }
  if (count == 0 || is_of_diffusers(conversion, source) ||
      conversion.format != FileFormat::safetensors)
    return;
  if (conversion.one_file) {
    findings.push_back(
        {.severity = Severity::info,
         .code = "convert.readers",
         .message = "loadstone reads the codes of a single file, but other libraries need the "
                    "quantization_config in the config.json of a folder",
         .suggestion = "for other libraries, choose a folder as the target"});
  } else if (!source.quantize.style) {
    constexpr QuantizeStyle other = QuantizeStyle::compressed_tensors;
    findings.push_back(
        {.severity = Severity::info,
         .code = "convert.readers",
         .message = fmt::format("transformers does not read the codes of the style {}",
                                name(QuantizeStyle::unified)),
         .suggestion =
             !is_compressible ? "open the folder with loadstone.transformers.from_pretrained()"
             : is_style_read(other, conversion.plan, source)
                 ? fmt::format("for transformers, choose the style {}", name(other))
                 : fmt::format("transformers would not read all of them in the style {} either; "
                               "docs/opens-where.md lists the programs that read them",
                               name(other))});
  }
}

void tell_unread_file(const Conversion& conversion, const ConvertOptions& source,
                      std::vector<Finding>& findings) {
  std::vector<std::string> names;
  for (const PlannedTarget& target : conversion.plan.targets) {
    if (target.quantization) names.push_back(target.name);
  }
  const bool is_codes = conversion.one_file && conversion.has_codes && !names.empty();
  if (!is_codes || !is_of_diffusers(conversion, source)) return;
  findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.unread",
       .sources = names,
       .message = fmt::format("diffusers would not read the codes of {} in one file as codes: {}",
                              counted(names.size(), "tensor"), name_list(names)),
       .suggestion = "open the file with loadstone.diffusers.from_single_file()"});
}

void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings) {
  const Renamed renamed = renamed_modules(conversion.plan);
  WritableStorage& storage = conversion.plan.catalog->storage().writable();
  for (const ExtraFile& file : conversion.extras) {
    if (renamed.empty() || (file.name != "config.json" && !is_claim(file.name))) continue;
    for (const auto& [key, entries] : old_entries(lists_in(file, storage), renamed)) {
      const std::vector<std::string> names(entries.begin(), entries.end());
      findings.push_back(
          {.severity = Severity::warning,
           .code = "convert.lists",
           .sources = names,
           .message = fmt::format("{}: '{}' lists modules under names that rules have changed: {}",
                                  printable(file.name), key, name_list(names)),
           .suggestion = "rename them in this list too: readers use it to decide which modules are "
                         "quantized"});
    }
  }
}

}  // namespace loadstone
