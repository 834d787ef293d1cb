// Quantized activations and caches, which a config declares next to the weights.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "base/text.h"
#include "base/words.h"
#include "catalog/config_sections.h"
#include "codec/activation_scheme.h"
#include "codec/companions.h"
#include "convert/config_findings.h"
#include "convert/extras.h"
#include "convert/left_out.h"
#include "convert/repack.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

struct Scheme {
  std::string numbers;  // "8-bit float, dynamic", or "none"
  std::string extent;   // "token", "group of 128": all that share a scale; empty: not declared

  [[nodiscard]] bool agrees(const Scheme& other) const {
    const bool may_differ = extent.empty() || other.extent.empty();
    return numbers == other.numbers && (may_differ || extent == other.extent);
  }
  [[nodiscard]] std::string text() const {
    return extent.empty() ? numbers : fmt::format("{}, per {}", numbers, extent);
  }
};

struct Declared {
  std::vector<Scheme> activations;  // each once; empty: not declared
  std::string cache;                // empty: it is not quantized
};

template <typename Value>
Value value_at(const dom::object& object, std::string_view key, Value otherwise) {
  Value value{};
  return object[key].get(value) == simdjson::SUCCESS ? value : otherwise;
}

std::string text_at(const dom::object& object, std::string_view key) {
  return std::string(value_at(object, key, std::string_view()));
}

// Reads an object of compressed-tensors, and adds the defaults of the library.
Scheme scheme_of(const dom::element& value) {
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS) return {std::string(no_scheme), {}};
  const auto bits = value_at<std::int64_t>(object, "num_bits", 8);
  const auto group = value_at<std::int64_t>(object, "group_size", 0);
  const bool is_dynamic = value_at(object, "dynamic", false);
  const bool is_symmetric = value_at(object, "symmetric", true);
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

// Completes config.json from ModelOpt's own file.
Declared declared_in(const ModelFolder& folder) {
  Declared declared = declared_in(folder.config);
  for (const ExtraFile& file : folder.files) {
    if (file.name != claim_name) continue;
    Declared other = declared_in(text_of(file));
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

// The scales that no tensor of the output has.
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
        fmt::format("{}{} of {} left out: {}", message.empty() ? "" : "; ",
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
    message = fmt::format("the source declares a quantized cache ({}), and the output does not",
                          printable(model->cache));
  }
  tell(std::move(message), "the cache", scales, findings);
}

}  // namespace

void tell_schemes(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings) {
  const Plan& plan = conversion.plan;
  std::vector<Declared> models = {declared_in(source.folder)};
  const auto& checkpoints = plan.catalog->checkpoints();
  for (std::size_t i = 1; i < checkpoints.size(); ++i) {
    models.push_back(declared_in(claims_beside(*checkpoints[i])));
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
          "the config declares another scheme for activations: {} in the source, "
          "{} in the output",
          printable(schemes_text(before)), printable(schemes_text(after)));
    }
  }
  tell(std::move(message), "activations", scales, findings);
}

}  // namespace loadstone
