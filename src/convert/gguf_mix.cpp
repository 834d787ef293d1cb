#include "convert/gguf_mix.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <utility>

#include "convert/gguf_mix_rules.h"

namespace loadstone {

namespace {

// In the order of Mix.
constexpr auto mixes = std::to_array<MixInfo>({
    {"f32", 0, Dtype::f32},
    {"f16", 1, Dtype::f16},
    {"bf16", 32, Dtype::bf16},
    {"q4_0", 2, BlockFormat::q4_0},
    {"q4_1", 3, BlockFormat::q4_1},
    {"q5_0", 8, BlockFormat::q5_0},
    {"q5_1", 9, BlockFormat::q5_1},
    {"q8_0", 7, BlockFormat::q8_0},
    {"q2_k", 10, BlockFormat::q2_k},
    {"q2_k_s", 21, BlockFormat::q2_k},
    {"q3_k_s", 11, BlockFormat::q3_k},
    {"q3_k_m", 12, BlockFormat::q3_k},
    {"q3_k_l", 13, BlockFormat::q3_k},
    {"q4_k_s", 14, BlockFormat::q4_k},
    {"q4_k_m", 15, BlockFormat::q4_k},
    {"q5_k_s", 16, BlockFormat::q5_k},
    {"q5_k_m", 17, BlockFormat::q5_k},
    {"q6_k", 18, BlockFormat::q6_k},
    {"iq1_s", 24, BlockFormat::iq1_s},
    {"iq1_m", 31, BlockFormat::iq1_m},
    {"iq2_xxs", 19, BlockFormat::iq2_xxs},
    {"iq2_xs", 20, BlockFormat::iq2_xs},
    {"iq2_s", 28, BlockFormat::iq2_xs},
    {"iq2_m", 29, BlockFormat::iq2_s},
    {"iq3_xxs", 23, BlockFormat::iq3_xxs},
    {"iq3_xs", 22, BlockFormat::iq3_s},
    {"iq3_s", 26, BlockFormat::iq3_s},
    {"iq3_m", 27, BlockFormat::iq3_s},
    {"iq4_nl", 25, BlockFormat::iq4_nl},
    {"iq4_xs", 30, BlockFormat::iq4_xs},
    {"tq1_0", 36, BlockFormat::tq1_0},
    {"tq2_0", 37, BlockFormat::tq2_0},
    {"mxfp4_moe", 38, BlockFormat::mxfp4},
});
static_assert(mixes.size() == static_cast<std::size_t>(Mix::mxfp4_moe) + 1);

// ---- which tensors

// Weights that stay as they are, by a part of the name.
constexpr std::string_view plain_parts[] = {
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",  // expert ids of tokens
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
};
constexpr std::string_view plain_text_names[] = {"position_embd.weight", "token_types.weight"};

constexpr std::string_view glm5_next = "glm5-next";
constexpr std::string_view glm5_plain_parts[] = {
    "hc_",
    "indexer.attn_q_b",
    "indexer.attn_k",
    "indexer.proj",
    "indexer_compressor_gate",
    "indexer_compressor_ape",
    "ssm_f_a.weight",
    "ssm_f_b.weight",
    "ssm_g_a.weight",
    "ssm_g_b.weight",
    "ssm_beta.weight",
    "attn_kv_a_mqa.weight",
    "attn_k_b.weight",
    "attn_v_b.weight",
};
// Never below Q8_0.
constexpr std::string_view glm5_wide_parts[] = {"attn_q_a", "attn_q_b", "nextn.eh_proj"};

// Those of one and two bits a number, whose rules are their own in some places.
constexpr bool is_lowest(Mix mix) noexcept {
  switch (mix) {
    case Mix::iq1_s:
    case Mix::iq1_m:
    case Mix::iq2_xxs:
    case Mix::iq2_xs:
    case Mix::iq2_s:
    case Mix::iq2_m:
      return true;
    default:
      return false;
  }
}

// Models of 70B, whose values of attention are small beside the rest.
bool is_70b(const MixModel& model) noexcept {
  constexpr std::pair<std::string_view, std::uint64_t> sizes[] = {
      {"llama", 80}, {"qwen2", 80}, {"deci", 80}, {"olmo", 80}, {"jais2", 68}};
  const bool is_size = std::ranges::any_of(sizes, [&](const auto& size) {
    return model.architecture == size.first && model.layers == size.second;
  });
  if (model.architecture != "llama") return is_size;
  return is_size && model.experts != 8 && model.heads != model.kv_heads;
}

// "blk.7.ffn_up.weight": 7
std::optional<std::uint64_t> layer_of(std::string_view name) noexcept {
  constexpr std::string_view head = "blk.";
  if (!name.starts_with(head)) return std::nullopt;
  std::uint64_t layer = 0;
  const char* const end = name.data() + name.size();
  const auto [after, problem] = std::from_chars(name.data() + head.size(), end, layer);
  if (problem != std::errc() || after == end || *after != '.') return std::nullopt;
  return layer;
}

std::uint64_t row_of(const Shape& shape) noexcept {
  return shape.rank() == 0 ? 1 : shape.extents().back();
}

bool is_whole(Encoding type, const Shape& shape) noexcept {
  return type.is_dtype() || row_of(shape) % layout(type.block_format()).elements == 0;
}

// Not thread-safe.
class Mixer {
 public:
  Mixer(Mix mix, const MixModel& model, bool has_importance, std::span<const MixTensor> tensors)
      : mix_(mix), model_(model), has_importance_(has_importance), tensors_(tensors) {
    for (const MixTensor& tensor : tensors) {
      const Role role = role_of(tensor.name);
      if (role == Role::attn_v) ++values_;
      if (role == Role::output) is_tied_ = false;
    }
  }

  std::vector<Encoding> run() {
    std::vector<Encoding> types(tensors_.size(), info(mix_).type);
    for (const std::size_t i : in_order()) types[i] = type_of(tensors_[i]);
    return types;
  }

 private:
  // Layers by number; llama.cpp counts in this order.
  [[nodiscard]] std::vector<std::size_t> in_order() const {
    std::vector<std::size_t> order(tensors_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](std::size_t i) {
      const auto layer = layer_of(tensors_[i].name);
      return std::pair(layer ? static_cast<std::int64_t>(*layer) : -1, tensors_[i].name);
    };
    std::ranges::stable_sort(order, {}, key);
    return order;
  }

  [[nodiscard]] Encoding type_of(const MixTensor& tensor) {
    const Encoding usual = info(mix_).type;
    if (tensor.asked) return fitting_type(*tensor.asked, *tensor.shape);
    if (usual.is_dtype()) return usual;
    return fitting_type(ruled_type(tensor, usual), *tensor.shape);
  }

  [[nodiscard]] Encoding ruled_type(const MixTensor& tensor, Encoding usual) {
    const Role role = role_of(tensor.name);
    if (model_.architecture == glm5_next && has_any(tensor.name, glm5_wide_parts)) {
      return BlockFormat::q8_0;
    }
    if (role == Role::output || (is_tied_ && role == Role::token_embd)) {
      return output_type(*tensor.shape, usual);
    }
    if (mix_ == Mix::mxfp4_moe) return expert_type(*tensor.shape, role);
    if (role == Role::attn_v) return value_type(usual);
    Facts facts = facts_of(0, model_.layers);
    if (role == Role::ffn_down || role == Role::ffn_gate || role == Role::ffn_up) {
      std::uint64_t& counter = counters_[static_cast<std::size_t>(role)];
      facts.index = counter++;
      // Experts of a layer are several tensors, so that their own number says it.
      if (model_.experts > 1 && !is_lowest(mix_)) {
        facts.index = layer_of(tensor.name).value_or(facts.index);
      }
    }
    if (role == Role::attn_k && model_.experts == 8) {
      return is_lowest(mix_) ? BlockFormat::q4_k : BlockFormat::q8_0;
    }
    return by_rule(role, facts, usual);
  }

  [[nodiscard]] Encoding output_type(const Shape& shape, Encoding usual) const {
    if (mix_ == Mix::mxfp4_moe || is_falcon() || !is_whole(usual, shape)) return BlockFormat::q8_0;
    if (is_lowest(mix_) || mix_ == Mix::iq3_xxs) return BlockFormat::q5_k;
    return usual == Encoding(BlockFormat::q8_0) ? usual : Encoding(BlockFormat::q6_k);
  }

  [[nodiscard]] Encoding expert_type(const Shape& shape, Role role) const {
    const auto& extents = shape.extents();
    const bool is_stack = extents.size() >= 3 && extents[extents.size() - 3] > 1;
    const bool is_role = role == Role::ffn_up || role == Role::ffn_gate || role == Role::ffn_down;
    // Its projections of attention are stacks, too.
    if (model_.architecture == "bailingmoe3" && !is_role) return BlockFormat::q8_0;
    return is_stack ? BlockFormat::mxfp4 : BlockFormat::q8_0;
  }

  [[nodiscard]] Encoding value_type(Encoding usual) {
    Encoding type = by_rule(Role::attn_v, facts_of(value_++, values_), usual);
    if (is_lowest(mix_)) return type;
    const bool is_narrow =
        type == Encoding(BlockFormat::q3_k) || type == Encoding(BlockFormat::q4_k);
    if (is_narrow && is_70b(model_)) type = BlockFormat::q5_k;
    return model_.experts == 8 ? Encoding(BlockFormat::q8_0) : type;
  }

  [[nodiscard]] Encoding by_rule(Role role, const Facts& facts, Encoding usual) const {
    for (const MixRule& rule : mix_rules()) {
      if (rule.role == role && rule.mix == mix_ && rule.when(facts)) return rule.type;
    }
    return usual;
  }

  [[nodiscard]] Facts facts_of(std::uint64_t index, std::uint64_t count) const noexcept {
    return {.index = index,
            .count = count,
            .groups = model_.kv_heads == 0 ? 0 : model_.heads / model_.kv_heads,
            .experts = model_.experts,
            .is_falcon = is_falcon(),
            .has_importance = has_importance_};
  }

  [[nodiscard]] bool is_falcon() const noexcept { return model_.architecture == "falcon"; }

  Mix mix_;
  const MixModel& model_;
  bool has_importance_;
  std::span<const MixTensor> tensors_;
  std::uint64_t values_ = 0;  // tensors of Role::attn_v
  std::uint64_t value_ = 0;   // the next of them
  bool is_tied_ = true;       // the output head is the embedding
  std::array<std::uint64_t, static_cast<std::size_t>(Role::other) + 1> counters_ = {};
};

// A number, or that of the first layer where there is a list.
std::optional<std::uint64_t> first_number(const Metadata& metadata, const std::string& key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  MetadataValue item = found->second;
  if (const auto* const array = std::get_if<MetadataArray>(&item.value)) {
    if (array->empty()) return std::nullopt;
    MetadataValue first = (*array)[0];
    item = std::move(first);
  }
  if (const auto* const number = std::get_if<std::uint64_t>(&item.value)) return *number;
  const auto* const number = std::get_if<std::int64_t>(&item.value);
  if (number == nullptr || *number < 0) return std::nullopt;
  return static_cast<std::uint64_t>(*number);
}

}  // namespace

const MixInfo& info(Mix mix) noexcept { return mixes[static_cast<std::size_t>(mix)]; }

std::optional<Mix> find_mix(std::string_view name) {
  std::string lower(name);
  for (char& character : lower) {
    if (character >= 'A' && character <= 'Z') character = static_cast<char>(character - 'A' + 'a');
  }
  const auto found = std::ranges::find(mixes, lower, &MixInfo::name);
  if (found == mixes.end()) return std::nullopt;
  return static_cast<Mix>(found - mixes.begin());
}

std::vector<std::string> mix_names() {
  std::vector<std::string> names;
  for (const MixInfo& mix : mixes) names.emplace_back(mix.name);
  return names;
}

std::optional<MixModel> mix_model(const Metadata& metadata) {
  const auto named = metadata.find("general.architecture");
  if (named == metadata.end()) return std::nullopt;
  const auto* const architecture = std::get_if<std::string>(&named->second.value);
  if (architecture == nullptr) return std::nullopt;
  const auto number = [&](const char* key) {
    return first_number(metadata, *architecture + "." + key);
  };
  const auto layers = number("block_count");
  if (!layers) return std::nullopt;
  MixModel model = {.architecture = *architecture, .layers = *layers};
  model.experts = number("expert_count").value_or(0);
  model.heads = number("attention.head_count").value_or(0);
  model.kv_heads = number("attention.head_count_kv").value_or(model.heads);
  return model;
}

bool is_mixed(std::string_view name, const Shape& shape, std::string_view architecture) noexcept {
  // Leading dims of 1 are none in ggml.
  const auto& extents = shape.extents();
  const auto first = std::ranges::find_if(extents, [](std::uint64_t each) { return each != 1; });
  if (extents.end() - first < 2) return false;
  if (!name.ends_with("weight") || has_any(name, plain_parts)) return false;
  if (std::ranges::find(plain_text_names, name) != std::end(plain_text_names)) return false;
  return architecture != glm5_next || !has_any(name, glm5_plain_parts);
}

std::vector<Encoding> mixed_types(Mix mix, const MixModel& model, bool has_importance,
                                  std::span<const MixTensor> tensors) {
  return Mixer(mix, model, has_importance, tensors).run();
}

bool mix_needs_importance(std::optional<Mix> mix, std::string_view name,
                          BlockFormat type) noexcept {
  const Role role = role_of(name);
  if (role == Role::token_embd || role == Role::output) return false;
  switch (type) {
    case BlockFormat::iq1_s:
    case BlockFormat::iq1_m:
    case BlockFormat::iq2_xxs:
    case BlockFormat::iq2_xs:
    case BlockFormat::iq2_s:
    case BlockFormat::iq3_xxs:
      return true;
    case BlockFormat::q2_k:
      return mix == Mix::q2_k_s;
    default:
      return false;
  }
}

bool is_token_embedding(std::string_view name) noexcept {
  return role_of(name) == Role::token_embd;
}

Encoding fitting_type(Encoding type, const Shape& shape) noexcept {
  if (is_whole(type, shape)) return type;
  Encoding smaller = type;
  switch (type.block_format()) {
    case BlockFormat::iq1_s:
    case BlockFormat::iq1_m:
    case BlockFormat::iq2_xxs:
    case BlockFormat::iq2_xs:
    case BlockFormat::iq2_s:
    case BlockFormat::iq3_xxs:
    case BlockFormat::iq3_s:
    case BlockFormat::iq4_xs:
      smaller = BlockFormat::iq4_nl;
      break;
    case BlockFormat::q2_k:
    case BlockFormat::q3_k:
    case BlockFormat::tq1_0:
    case BlockFormat::tq2_0:
      smaller = BlockFormat::q4_0;
      break;
    case BlockFormat::q4_k:
      smaller = BlockFormat::q5_0;
      break;
    case BlockFormat::q5_k:
      smaller = BlockFormat::q5_1;
      break;
    case BlockFormat::q6_k:
      smaller = BlockFormat::q8_0;
      break;
    default:
      break;
  }
  return is_whole(smaller, shape) ? smaller : Encoding(Dtype::f16);
}

}  // namespace loadstone
