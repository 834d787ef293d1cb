#include "catalog/transform_claim.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>

#include "base/text.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

std::string_view text_at(const dom::object& object, std::string_view key) {
  return json_as<std::string_view>(object[key]).value_or("");
}

bool is_true(const dom::object& object, std::string_view key) {
  return json_as<bool>(object[key]).value_or(false);
}

void add(QuantizationClaim& claim, std::string name) {
  auto& known = claim.transforms;
  if (std::ranges::find(known, name) == known.end()) known.push_back(std::move(name));
}

// Adds the online transforms of compressed-tensors. All locations except those of weights are
// online (TransformLocation). The library names a transform's module by its group and location:
// "R4_input".
void add_online_transforms(QuantizationClaim& claim, const dom::object& section) {
  const auto groups = json_as<dom::object>(section["transform_config"]["config_groups"]);
  if (!groups) return;
  for (const auto group : *groups) {
    const auto places = json_as<dom::array>(group.value["apply"]);
    if (!places) continue;
    for (const dom::element each : *places) {
      const auto place = json_as<dom::object>(each);
      if (!place) continue;
      const std::string_view location = text_at(*place, "location");
      if (location == "weight_input" || location == "weight_output") continue;
      add(claim, fmt::format("{}_{}", group.key, location));
    }
  }
}

// Adds the online rotations of QuaRot and SpinQuant. R2 is always part of the weights, and R1
// unless it is online. R3 rotates queries and keys, R4 the inputs of down projections.
void add_rotations(QuantizationClaim& claim, const dom::object& config, std::string_view prefix) {
  if (is_true(config, "online_r1_rotation") && is_true(config, "r1")) {
    add(claim, fmt::format("{}_r1", prefix));
  }
  for (const std::string_view each : {"r3", "r4"}) {
    if (is_true(config, each)) add(claim, fmt::format("{}_{}", prefix, each));
  }
}

// Quark.
void add_algorithms(QuantizationClaim& claim, const dom::object& section) {
  const auto take = [&](const dom::element& element) {
    const auto algorithm = json_as<dom::object>(element);
    if (!algorithm) return;
    const std::string_view name = text_at(*algorithm, "name");
    if (name == "rotation" || name == "quarot") add_rotations(claim, *algorithm, name);
  };
  dom::element value;
  if (section["algo_config"].get(value) != simdjson::SUCCESS) return;
  const auto algorithms = json_as<dom::array>(value);
  if (!algorithms) return take(value);
  for (const dom::element each : *algorithms) take(each);
}

}  // namespace

void add_transforms(QuantizationClaim& claim, const dom::object& section) {
  add_online_transforms(claim, section);
  add_algorithms(claim, section);
  for (const std::string_view key : {"rotation_config", "spinquant_config"}) {  // AutoRound
    const auto rotation = json_as<dom::object>(section[key]);
    if (!rotation) continue;
    add_rotations(claim, *rotation, "spinquant");
    // Without SpinQuant's members, a Hadamard matrix rotates the input of each layer.
    const std::string_view type = text_at(*rotation, "hadamard_type");
    if (!type.empty()) add(claim, fmt::format("hadamard_type: {}", type));
  }
  const auto rotate = json_as<dom::object>(section["rotate"]);  // ModelOpt
  const bool is_rotated = rotate ? is_true(*rotate, "enable") : is_true(section, "rotate");
  if (is_rotated) add(claim, "rotate: true");
}

bool may_be_transform(std::string_view tensor_name) noexcept {
  constexpr auto endings = std::to_array<std::string_view>(
      {"_input.weight", "_output.weight", "_q_attn.weight", "_k_cache.weight", "_v_cache.weight"});
  return std::ranges::any_of(
      endings, [&](std::string_view ending) { return tensor_name.ends_with(ending); });
}

bool is_transform(const QuantizationClaim& claim, std::string_view tensor_name) {
  return std::ranges::any_of(claim.transforms, [&](const std::string& transform) {
    return tensor_name.find("." + transform) != std::string_view::npos;
  });
}

std::optional<Finding> scaled_activation_finding(const Catalog& catalog) {
  for (const auto& each : catalog.checkpoints()) {
    if (auto found = scaled_activation_finding(*each)) return found;
  }
  if (!catalog.checkpoints().empty()) return std::nullopt;
  constexpr std::string_view words = "qweight";
  constexpr std::string_view leaf = "scales";
  const QuantizedTensors& quantized = catalog.quantized();
  const bool has_words = std::ranges::any_of(quantized.tensors(), [&](const auto& each) {
    return each.data < catalog.tensors().size() &&
           catalog.tensors()[each.data].name.ends_with(words);
  });
  for (std::uint32_t i = 0; has_words && i < catalog.tensors().size(); ++i) {
    const std::string& name = catalog.tensors()[i].name;
    if (!name.ends_with(".scales") || quantized.is_companion(i)) continue;
    const std::string module = name.substr(0, name.size() - leaf.size());
    if (catalog.find(module + std::string(words))) continue;
    return Finding{.severity = Severity::error,
                   .code = "plan.encoding",
                   .sources = {name},
                   .message = fmt::format(
                       "'{}' divides the output of an activation while the model runs; only "
                       "the config of the quantized checkpoint declares this",
                       printable(name)),
                   .suggestion = "keep the codes and the config together",
                   .found = "scales without qweight",
                   .expected = "weights that do not need scaled activations"};
  }
  return std::nullopt;
}

std::optional<Finding> transform_finding(const Catalog& catalog) {
  for (const auto& each : catalog.checkpoints()) {
    if (auto found = transform_finding(*each)) return found;
  }
  const auto& transforms = catalog.quantization_claim().transforms;
  if (transforms.empty() || !catalog.checkpoints().empty()) return std::nullopt;
  return Finding{
      .severity = Severity::error,
      .code = "q.transform",
      .message = fmt::format("'{}': the config transforms activations while the model runs ({}), "
                             "and the weights are wrong without these transforms",
                             printable(catalog.root(), 400), name_list(transforms)),
      .suggestion =
          "keep the codes and the config together, or ask the library that wrote the "
          "checkpoint for plain weights",
      .found = name_list(transforms),
      .expected = "transforms that are part of the weights"};
}

}  // namespace loadstone
