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
    {".diff", AdapterRole::difference},
    {".diff_b", AdapterRole::bias_difference},
    {".w_norm", AdapterRole::difference},
    {".b_norm", AdapterRole::bias_difference},
});

// Parts of tensor names that belong to methods other than the product of two matrices.
constexpr std::string_view unknown_parts[] = {".lora_mid.",   ".hada_",    ".lokr_",      ".oft_",
                                              ".lora_B.bias", ".on_input", ".vera_lambda"};

// The part of a pipeline to which a prefix refers: the denoiser, or the only model of a checkpoint
// (0), or a text encoder by its number.
struct Prefix {
  std::string_view text;
  unsigned encoder = 0;
};

// Prefixes that adapters put before the names of a model.
constexpr auto adapter_prefixes = std::to_array<Prefix>({
    {""},
    {"transformer."},
    {"unet."},
    {"diffusion_model."},
    {"model.diffusion_model."},
    {"model."},
    {"prior."},
    {"text_encoder.", 1},
    {"text_encoder_2.", 2},
    {"text_encoder_3.", 3},
});
constexpr auto underscored_prefixes = std::to_array<Prefix>({
    {"lora_unet_"},
    {"lora_transformer_"},
    {"lycoris_"},
    {"lora_te_", 1},
    {"lora_te1_", 1},
    {"lora_te2_", 2},
    {"lora_te3_", 3},
});
// Prefixes that checkpoints put before the names of a model, such as files with a whole pipeline.
constexpr auto base_prefixes = std::to_array<Prefix>({
    {""},
    {"model.diffusion_model."},
    {"diffusion_model."},
    {"transformer."},
    {"unet."},
    {"net."},
    {"model."},
    {"", 1},
    {"text_encoder.", 1},
    {"cond_stage_model.transformer.", 1},
    {"conditioner.embedders.0.transformer.", 1},
    {"text_encoders.clip_l.transformer.", 1},
    {"", 2},
    {"text_encoder_2.", 2},
    {"conditioner.embedders.1.transformer.", 2},
    {"text_encoders.clip_g.transformer.", 2},
    {"text_encoders.t5xxl.transformer.", 2},
    {"", 3},
    {"text_encoder_3.", 3},
    {"text_encoders.t5xxl.transformer.", 3},
});

// Calls `visit` with each name that an adapter's module, or tensor, may have in the base.
template <typename Visit>
void for_each_base_name(std::string_view name, const Visit& visit) {
  for (const Prefix& prefix : adapter_prefixes) {
    if (!name.starts_with(prefix.text)) continue;
    const std::string_view rest = name.substr(prefix.text.size());
    for (const Prefix& base : base_prefixes) {
      if (base.encoder == prefix.encoder) visit(fmt::format("{}{}", base.text, rest), base);
    }
  }
}

// The number that AdapterPlace::encoder has for a module that is found under this prefix. The names
// of a third encoder, which is T5, differ from those of the other encoders.
unsigned encoder_of(const Prefix& base) {
  constexpr unsigned third = 3;
  return base.text.empty() && base.encoder != third ? base.encoder : 0;
}

void add_once(AdapterPlace place, std::vector<AdapterPlace>& places) {
  const auto is_known = [&](const AdapterPlace& each) { return each.name == place.name; };
  if (std::ranges::none_of(places, is_known)) places.push_back(std::move(place));
}

// Returns the places of the first name for which `find` returns one: the name itself, the name
// without peft's prefix, or names with other prefixes, which may be several.
template <typename Find>
std::vector<AdapterPlace> places_of(std::string_view name, const Find& find) {
  if (auto place = find(std::string(name))) return {*std::move(place)};
  if (name.starts_with(peft_prefix)) {
    name.remove_prefix(peft_prefix.size());
    if (auto place = find(std::string(name))) return {*std::move(place)};
  }
  std::vector<AdapterPlace> places;
  for_each_base_name(name, [&](const std::string& candidate, const Prefix& base) {
    auto place = find(candidate);
    if (!place) return;
    place->encoder = encoder_of(base);
    add_once(*std::move(place), places);
  });
  return places;
}

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
    for (const Prefix& prefix : base_prefixes) {
      if (!module.starts_with(prefix.text)) continue;
      std::vector<std::string>& names = underscored_[fmt::format(
          "{}{}", prefix.text, with_underscores(module.substr(prefix.text.size())))];
      if (names.empty() || names.back() != name) names.push_back(name);
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

std::optional<AdapterPlace> AdapterPlaces::find_tensor(const std::string& name) const {
  return has(name) ? std::optional(AdapterPlace{.name = name}) : std::nullopt;
}

// Finds a module whose name has underscores instead of dots, as kohya and LyCORIS write it.
std::vector<AdapterPlace> AdapterPlaces::find_underscored(const std::string& module) const {
  std::vector<AdapterPlace> places;
  for (const Prefix& prefix : underscored_prefixes) {
    if (!module.starts_with(prefix.text)) continue;
    const std::string rest = module.substr(prefix.text.size());
    for (const Prefix& base : base_prefixes) {
      if (base.encoder != prefix.encoder) continue;
      const auto found = underscored_.find(fmt::format("{}{}", base.text, rest));
      if (found == underscored_.end()) continue;
      for (const std::string& name : found->second) {
        add_once({.name = name, .encoder = encoder_of(base)}, places);
      }
    }
  }
  return places;
}

std::vector<AdapterPlace> AdapterPlaces::find(const std::string& module) const {
  auto places = places_of(module, [&](const std::string& name) { return find_exact(name); });
  return places.empty() ? find_underscored(module) : places;
}

std::vector<AdapterPlace> AdapterPlaces::find_value(const std::string& tensor) const {
  std::string name = tensor;
  constexpr std::string_view wrapped = ".base_layer.";
  if (const auto at = name.find(wrapped); at != std::string::npos) {
    name.erase(at, wrapped.size() - 1);
  }
  return places_of(name, [&](const std::string& each) { return find_tensor(each); });
}

}  // namespace loadstone
