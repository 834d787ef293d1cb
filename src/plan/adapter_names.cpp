#include "plan/adapter_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace loadstone {

namespace {

struct Ending {
  std::string_view text;
  AdapterRole role;
};

// The first ending that matches a tensor's name determines the role.
constexpr auto endings = std::to_array<Ending>({
    {".lora_A.weight", AdapterRole::right},
    {".lora_B.weight", AdapterRole::left},
    {".lora_A.default.weight", AdapterRole::right},
    {".lora_B.default.weight", AdapterRole::left},
    {".lora_embedding_A", AdapterRole::embedding_right},
    {".lora_embedding_B", AdapterRole::embedding_left},
    {".lora_magnitude_vector.weight", AdapterRole::magnitude},
    {".lora_magnitude_vector", AdapterRole::magnitude},
    {".lora.down.weight", AdapterRole::right},
    {".lora.up.weight", AdapterRole::left},
    {"_lora.down.weight", AdapterRole::right},
    {"_lora.up.weight", AdapterRole::left},
    {".lora_linear_layer.down.weight", AdapterRole::right},
    {".lora_linear_layer.up.weight", AdapterRole::left},
    {".lora_down.weight", AdapterRole::right},
    {".lora_up.weight", AdapterRole::left},
    {".alpha", AdapterRole::alpha},
    {".dora_scale", AdapterRole::magnitude},
});

// Parts of tensor names that belong to methods other than the product of two matrices.
constexpr std::string_view unknown_parts[] = {".lora_mid.", ".hada_",       ".lokr_",
                                              ".oft_",      ".lora_B.bias", ".on_input",
                                              ".diff",      ".vera_lambda"};

// A prefix that adapters put before the base's names.
struct Prefix {
  std::string_view text;
  unsigned encoder = 0;                        // the number of the pipeline's text encoder
  std::array<std::string_view, 2> parts = {};  // the base's prefixes if the pipeline is one file
};

// The first prefix whose removal leaves the name of a base tensor is used.
constexpr auto adapter_prefixes = std::to_array<Prefix>({
    {""},
    {"base_model.model."},
    {"transformer."},
    {"unet."},
    {"text_encoder.", 1},
    {"text_encoder_2.", 2},
    {"diffusion_model."},
    {"model.diffusion_model."},
    {"model."},
    {"prior."},
});
constexpr std::array<std::string_view, 2> first_encoder = {"cond_stage_model.transformer.",
                                                           "conditioner.embedders.0.transformer."};
constexpr auto kohya_prefixes = std::to_array<Prefix>({
    {"lora_unet_", 0, {"model.diffusion_model."}},
    {"lora_transformer_", 0, {"model.diffusion_model."}},
    {"lora_te_", 1, first_encoder},
    {"lora_te1_", 1, first_encoder},
    {"lora_te2_", 2, {"conditioner.embedders.1.transformer."}},
    {"lora_te3_"},  // T5, whose names are unique among encoders
});

// Projections that some models store as one joined matrix, in the order of its rows.
struct Joined {
  std::string_view name;
  std::array<std::string_view, 3> parts;  // the last is empty if there are two
};
constexpr auto joined_projections = std::to_array<Joined>({
    {"qkv_proj", {"q_proj", "k_proj", "v_proj"}},
    {"to_qkv", {"to_q", "to_k", "to_v"}},
    {"gate_up_proj", {"gate_proj", "up_proj", ""}},
});

AdapterPlace::Part part_of(const Joined& joined, std::size_t index) {
  if (index == 0) return AdapterPlace::Part::first;
  if (index == 1 && !joined.parts[2].empty()) return AdapterPlace::Part::middle;
  return AdapterPlace::Part::last;
}

// Returns the place of one expert's module in a stack of experts: "mlp.experts.3.up_proj" is in
// "mlp.experts.gate_up_proj".
std::optional<AdapterPlace> expert_place(const std::string& module) {
  constexpr std::string_view infix = ".experts.";
  const auto at = module.rfind(infix);
  if (at == std::string::npos) return std::nullopt;
  AdapterPlace place = {.part = AdapterPlace::Part::expert};
  const char* const begin = module.data() + at + infix.size();
  const char* const end = module.data() + module.size();
  const auto [after, problem] = std::from_chars(begin, end, place.expert);
  if (problem != std::errc() || after == end || *after != '.') return std::nullopt;
  const std::string_view role(after + 1, static_cast<std::size_t>(end - after - 1));
  const std::string experts = module.substr(0, at + infix.size());
  if (role == "down_proj") {
    place.name = experts + "down_proj";
    return place;
  }
  if (role != "gate_proj" && role != "up_proj") return std::nullopt;
  place.name = experts + "gate_up_proj";
  place.share = role == "up_proj" ? 1 : 0;
  place.shares = 2;
  return place;
}

std::string with_underscores(std::string name) {
  std::ranges::replace(name, '.', '_');
  return name;
}

}  // namespace

AdapterName adapter_name(std::string_view tensor) {
  for (const Ending& ending : endings) {
    if (!tensor.ends_with(ending.text) || tensor.size() == ending.text.size()) continue;
    return {std::string(tensor.substr(0, tensor.size() - ending.text.size())), ending.role};
  }
  const bool is_unknown = std::ranges::any_of(unknown_parts, [&](std::string_view part) {
    return tensor.find(part) != std::string_view::npos;
  });
  return {std::string(tensor), is_unknown ? AdapterRole::unknown : AdapterRole::value};
}

bool is_factor_of_adapter(std::string_view tensor) {
  const AdapterRole role = adapter_name(tensor).role;
  if (role == AdapterRole::value) return tensor.ends_with(".lora_a") || tensor.ends_with(".lora_b");
  if (role != AdapterRole::unknown) return role < AdapterRole::alpha;
  return tensor.find(".hada_") != tensor.npos || tensor.find(".lokr_") != tensor.npos;
}

AdapterPlaces::AdapterPlaces(const std::vector<std::string>& base) {
  constexpr std::string_view ending = ".weight";
  for (const std::string& name : base) {
    names_.emplace(name, true);
    if (!name.ends_with(ending)) continue;
    const std::string module = name.substr(0, name.size() - ending.size());
    underscored_[with_underscores(module)].push_back(name);
    for (const Prefix& prefix : kohya_prefixes) {
      for (const std::string_view part : prefix.parts) {
        if (part.empty() || !module.starts_with(part)) continue;
        std::vector<std::string>& names =
            underscored_[fmt::format("{}{}", part, with_underscores(module.substr(part.size())))];
        if (names.empty() || names.back() != name) names.push_back(name);
      }
    }
  }
}

std::optional<AdapterPlace> AdapterPlaces::find_exact(const std::string& module) const {
  if (has(module + ".weight")) return AdapterPlace{.name = module + ".weight"};
  if (has(module)) return AdapterPlace{.name = module};
  const auto dot = module.rfind('.');
  const std::string parent = dot == std::string::npos ? "" : module.substr(0, dot + 1);
  const std::string_view leaf = std::string_view(module).substr(parent.size());
  for (const Joined& joined : joined_projections) {
    const auto part = std::ranges::find(joined.parts, leaf);
    const std::string name = fmt::format("{}{}.weight", parent, joined.name);
    if (part == joined.parts.end() || leaf.empty() || !has(name)) continue;
    return AdapterPlace{
        .name = name,
        .part = part_of(joined, static_cast<std::size_t>(part - joined.parts.begin()))};
  }
  auto place = expert_place(module);
  if (place && has(place->name)) return place;
  return std::nullopt;
}

std::optional<AdapterPlace> AdapterPlaces::find(const std::string& module,
                                                std::vector<std::string>& ambiguous) const {
  for (const Prefix& prefix : adapter_prefixes) {
    if (!module.starts_with(prefix.text)) continue;
    auto place = find_exact(module.substr(prefix.text.size()));
    if (!place) continue;
    place->encoder = prefix.encoder;
    return place;
  }
  // ComfyUI's name for a module of a single-file pipeline.
  if (module.starts_with("diffusion_model.")) {
    if (auto place = find_exact("model." + module)) return place;
  }
  for (const Prefix& prefix : kohya_prefixes) {
    if (!module.starts_with(prefix.text)) continue;
    const std::string rest = module.substr(prefix.text.size());
    std::vector<std::string> names;
    const auto add = [&](const std::string& name) {
      const auto found = underscored_.find(name);
      if (found == underscored_.end()) return;
      names.insert(names.end(), found->second.begin(), found->second.end());
    };
    for (const std::string_view part : prefix.parts) {
      if (!part.empty()) add(fmt::format("{}{}", part, rest));
    }
    const bool is_pipeline = !names.empty();
    add(rest);
    if (names.size() == 1) {
      return AdapterPlace{.name = names.front(), .encoder = is_pipeline ? 0 : prefix.encoder};
    }
    ambiguous = std::move(names);
    if (!ambiguous.empty()) return std::nullopt;
  }
  return std::nullopt;
}

std::optional<std::string> AdapterPlaces::find_value(const std::string& tensor) const {
  std::string name = tensor;
  constexpr std::string_view wrapped = ".base_layer.";
  if (const auto at = name.find(wrapped); at != std::string::npos) {
    name.erase(at, wrapped.size() - 1);
  }
  for (const Prefix& prefix : adapter_prefixes) {
    const std::string_view text = prefix.text;
    if (name.starts_with(text) && has(name.substr(text.size()))) return name.substr(text.size());
  }
  return std::nullopt;
}

}  // namespace loadstone
