
#include "convert/choose/gguf_mix.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "base/words.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr auto mix_table = std::to_array<Mix>({
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

// Mixes of one and two bits per value, which have separate rules.
constexpr std::string_view lowest_mixes = "iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq2_m";

bool is_lowest(const Mix& mix) noexcept { return is_word(mix.name, lowest_mixes); }

// ---- Tensors

// Weights that stay unchanged, by a part of the name.
constexpr std::string_view plain_parts =
    "_norm.weight ffn_gate_inp.weight altup laurel per_layer_model_proj ssm_conv1d "
    "ffn_gate_tid2eid.weight "  // expert ids of tokens
    "shortconv.conv.weight indexer.k_proj.weight indexer.q_proj.weight time_mix_first.weight "
    "time_mix_w0.weight time_mix_w1.weight time_mix_w2.weight time_mix_v0.weight "
    "time_mix_v1.weight time_mix_v2.weight time_mix_a0.weight time_mix_a1.weight "
    "time_mix_a2.weight time_mix_g1.weight time_mix_g2.weight time_mix_decay_w1.weight "
    "time_mix_decay_w2.weight time_mix_lerp_fused.weight attn_rel_b.weight .position_embd "
    "sam.pos_embd sam.neck. sam.net_ .rel_pos .patch_embd .patch_merger a.rvq.codebook "
    "mm.a.code_embd";
constexpr std::string_view plain_text_names = "position_embd.weight token_types.weight";

constexpr std::string_view glm5_next = "glm5-next";
constexpr std::string_view glm5_plain_parts =
    "hc_ indexer.attn_q_b indexer.attn_k indexer.proj indexer_compressor_gate "
    "indexer_compressor_ape ssm_f_a.weight ssm_f_b.weight ssm_g_a.weight ssm_g_b.weight "
    "ssm_beta.weight attn_kv_a_mqa.weight attn_k_b.weight attn_v_b.weight";
// Parts of the names of GLM tensors that never become smaller than Q8_0.
constexpr std::string_view glm5_wide_parts = "attn_q_a attn_q_b nextn.eh_proj";

// ---- Types

// Roles of tensors. Attention values have the role attn_v, even if they are fused with other
// weights.
enum class Role : std::uint8_t {
  token_embd,
  output,
  attn_v,
  attn_k,
  attn_q,
  attn_output,
  ffn_up,
  ffn_gate,
  ffn_down,
  other
};

Role role_of(std::string_view name) noexcept {
  if (name == "output.weight") return Role::output;
  if (name == "token_embd.weight" || name == "per_layer_token_embd.weight") return Role::token_embd;
  // The first match wins.
  constexpr std::pair<std::string_view, Role> parts[] = {
      {"attn_qkv.weight attn_kv_b.weight attn_v.weight", Role::attn_v},
      {"attn_k.weight", Role::attn_k},
      {"attn_q.weight", Role::attn_q},
      {"attn_output.weight", Role::attn_output},
      {"ffn_up", Role::ffn_up},
      {"ffn_gate", Role::ffn_gate},
      {"ffn_down", Role::ffn_down},
  };
  for (const auto& [words, role] : parts) {
    if (has_word(name, words)) return role;
  }
  return Role::other;
}

// Facts about a tensor that rules test.
enum Facts : unsigned {
  always = 0,
  // Position of the tensor's layer among the layers that have a tensor of this role.
  first_two = 1,
  first_four = 2,
  first_sixteenth = 4,
  first_eighth = 8,
  middle = 16,     // neither the first nor the last eighth
  more_bits = 32,  // the first eighth, the last eighth, and every third layer between them
  // Properties of the model.
  grouped = 64,        // at least four query heads share one head of keys and values
  four_experts = 128,  // at least four experts
  eight_experts = 256,
  other_experts = 512,  // any number of experts except eight
  falcon = 1024,
  not_falcon = 2048,
  importance = 4096,
  no_importance = 8192,
};

struct MixRule {
  Role role;
  std::string_view mixes;
  unsigned when;  // the rule applies if all of these facts are true
  BlockFormat type;
};

// The first match wins; a tensor without a match has the type of the mix.
constexpr MixRule mix_rules[] = {
    {Role::token_embd, "iq2_xxs iq2_xs iq1_s iq1_m", always, BlockFormat::q2_k},
    {Role::token_embd, "iq2_s iq2_m iq3_xxs", always, BlockFormat::iq3_s},
    {Role::token_embd, "tq1_0 tq2_0", always, BlockFormat::q4_k},

    {Role::attn_v, "q2_k q2_k_s", grouped, BlockFormat::q4_k},
    {Role::attn_v, "q2_k", always, BlockFormat::q3_k},
    {Role::attn_v, "q3_k_m", first_two, BlockFormat::q5_k},
    {Role::attn_v, "q3_k_m iq3_m", always, BlockFormat::q4_k},
    {Role::attn_v, "q3_k_l", always, BlockFormat::q5_k},
    {Role::attn_v, "q4_k_s", first_four, BlockFormat::q5_k},
    {Role::attn_v, "q4_k_m q5_k_m", more_bits, BlockFormat::q6_k},
    {Role::attn_v, lowest_mixes, grouped, BlockFormat::q4_k},
    {Role::attn_v, lowest_mixes, four_experts, BlockFormat::q4_k},
    {Role::attn_v, "iq1_s iq1_m iq2_xxs iq2_xs", always, BlockFormat::q2_k},
    {Role::attn_v, "iq2_s iq2_m", always, BlockFormat::iq3_s},
    {Role::attn_v, "iq3_xxs iq3_xs iq3_s", grouped, BlockFormat::q4_k},
    {Role::attn_v, "iq3_xxs", no_importance, BlockFormat::iq3_s},
    {Role::attn_v, "iq4_nl iq4_xs", grouped, BlockFormat::q5_k},

    {Role::attn_k, "iq3_xs", always, BlockFormat::iq3_xxs},
    {Role::attn_k, "iq3_xxs", always, BlockFormat::iq2_s},
    {Role::attn_q, "iq3_xs", always, BlockFormat::iq3_xxs},
    {Role::attn_q, "iq3_xxs", always, BlockFormat::iq2_s},

    {Role::ffn_down, "q2_k", always, BlockFormat::q3_k},
    {Role::ffn_down, "q2_k_s", first_eighth, BlockFormat::q4_k},
    {Role::ffn_down, "q3_k_m", first_sixteenth, BlockFormat::q5_k},
    {Role::ffn_down, "q3_k_m", not_falcon, BlockFormat::q4_k},
    {Role::ffn_down, "q3_k_m", more_bits, BlockFormat::q4_k},
    {Role::ffn_down, "q3_k_l", falcon, BlockFormat::q4_k},
    {Role::ffn_down, "q3_k_l", always, BlockFormat::q5_k},
    {Role::ffn_down, "q4_k_s", first_eighth | not_falcon, BlockFormat::q5_k},
    {Role::ffn_down, "q4_k_m", first_sixteenth | falcon, BlockFormat::q6_k},
    {Role::ffn_down, "q4_k_m", more_bits | falcon, BlockFormat::q5_k},
    {Role::ffn_down, "q4_k_m q5_k_m", more_bits, BlockFormat::q6_k},
    {Role::ffn_down, "q4_0", first_eighth | importance, BlockFormat::q4_1},
    {Role::ffn_down, "q5_0", first_eighth | importance, BlockFormat::q5_1},
    {Role::ffn_down, "iq1_s iq1_m iq2_xxs iq2_xs", first_eighth, BlockFormat::q2_k},
    {Role::ffn_down, "iq2_s iq2_m", first_eighth, BlockFormat::iq3_s},
    {Role::ffn_down, "iq3_xxs", first_eighth | no_importance, BlockFormat::q4_k},
    {Role::ffn_down, "iq3_xxs", no_importance, BlockFormat::q3_k},
    {Role::ffn_down, "iq3_m", first_eighth, BlockFormat::q4_k},
    {Role::ffn_down, "iq3_m", eight_experts | more_bits, BlockFormat::q4_k},
    {Role::ffn_down, "iq4_nl iq4_xs", first_eighth | no_importance, BlockFormat::q5_k},

    {Role::ffn_gate, "iq3_xs", middle, BlockFormat::iq3_xxs},
    {Role::ffn_up, "iq3_xs", middle, BlockFormat::iq3_xxs},

    {Role::attn_output, "q2_k q3_k_s q3_k_m q4_k_s q4_k_m iq3_xxs iq3_xs iq3_s iq3_m iq4_nl iq4_xs",
     eight_experts | not_falcon, BlockFormat::q5_k},
    {Role::attn_output, lowest_mixes, eight_experts, BlockFormat::q5_k},
    {Role::attn_output, "q2_k", other_experts | not_falcon, BlockFormat::q3_k},
    {Role::attn_output, "q3_k_m iq3_m", other_experts | not_falcon, BlockFormat::q4_k},
    {Role::attn_output, "q3_k_l", other_experts | not_falcon, BlockFormat::q5_k},
    {Role::attn_output, "q3_k_l", falcon, BlockFormat::q4_k},
    {Role::attn_output, "iq3_xxs", other_experts | not_falcon, BlockFormat::iq3_s},
    {Role::attn_output, "iq1_s iq1_m", always, BlockFormat::iq2_xxs},
    {Role::attn_output, "iq2_s iq2_m", always, BlockFormat::iq3_s},
};
static_assert(std::ranges::none_of(mix_rules, [](const MixRule& rule) {
  return any_word(rule.mixes, [](std::string_view word) {
    return std::ranges::find(mix_table, word, &Mix::name) == mix_table.end();
  });
}));

// Fallback types for rows that do not consist of whole blocks.
struct Fallback {
  BlockFormat type;
  BlockFormat smaller;
};
constexpr Fallback fallbacks[] = {
    {BlockFormat::iq1_s, BlockFormat::iq4_nl},   {BlockFormat::iq1_m, BlockFormat::iq4_nl},
    {BlockFormat::iq2_xxs, BlockFormat::iq4_nl}, {BlockFormat::iq2_xs, BlockFormat::iq4_nl},
    {BlockFormat::iq2_s, BlockFormat::iq4_nl},   {BlockFormat::iq3_xxs, BlockFormat::iq4_nl},
    {BlockFormat::iq3_s, BlockFormat::iq4_nl},   {BlockFormat::iq4_xs, BlockFormat::iq4_nl},
    {BlockFormat::q2_k, BlockFormat::q4_0},      {BlockFormat::q3_k, BlockFormat::q4_0},
    {BlockFormat::tq1_0, BlockFormat::q4_0},     {BlockFormat::tq2_0, BlockFormat::q4_0},
    {BlockFormat::q4_k, BlockFormat::q5_0},      {BlockFormat::q5_k, BlockFormat::q5_1},
    {BlockFormat::q6_k, BlockFormat::q8_0},
};

// Returns true for 70B models, whose attention values are small compared to their other weights.
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
  Mixer(const Mix& mix, const MixModel& model, bool has_importance,
        std::span<const MixTensor> tensors)
      : mix_(mix), model_(model), has_importance_(has_importance), tensors_(tensors) {
    for (const MixTensor& tensor : tensors) {
      const Role role = role_of(tensor.name);
      if (role == Role::attn_v) ++values_;
      if (role == Role::output) is_tied_ = false;
    }
  }

  std::vector<Encoding> run() {
    std::vector<Encoding> types(tensors_.size(), mix_.type);
    for (const std::size_t i : in_order()) types[i] = type_of(tensors_[i]);
    return types;
  }

 private:
  // Returns the indices of the tensors, sorted by layer: llama.cpp counts tensors in this order.
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
    const Encoding usual = mix_.type;
    if (tensor.asked) return fitting_type(*tensor.asked, *tensor.shape);
    if (usual.is_dtype()) return usual;
    return fitting_type(ruled_type(tensor, usual), *tensor.shape);
  }

  [[nodiscard]] Encoding ruled_type(const MixTensor& tensor, Encoding usual) {
    const Role role = role_of(tensor.name);
    if (model_.architecture == glm5_next && has_word(tensor.name, glm5_wide_parts)) {
      return BlockFormat::q8_0;
    }
    if (role == Role::output || (is_tied_ && role == Role::token_embd)) {
      return output_type(*tensor.shape, usual);
    }
    if (mix_.name == "mxfp4_moe") return expert_type(*tensor.shape, role);
    if (role == Role::attn_v) return value_type(usual);
    std::uint64_t index = 0;
    if (role == Role::ffn_down || role == Role::ffn_gate || role == Role::ffn_up) {
      std::uint64_t& counter = counters_[static_cast<std::size_t>(role)];
      index = counter++;
      // Each expert may be a separate tensor, so the layer's number in the name replaces the count.
      if (model_.experts > 1 && !is_lowest(mix_)) {
        index = layer_of(tensor.name).value_or(index);
      }
    }
    if (role == Role::attn_k && model_.experts == 8) {
      return is_lowest(mix_) ? BlockFormat::q4_k : BlockFormat::q8_0;
    }
    return by_rule(role, facts_of(index, model_.layers), usual);
  }

  [[nodiscard]] Encoding output_type(const Shape& shape, Encoding usual) const {
    if (mix_.name == "mxfp4_moe" || is_falcon() || !is_whole(usual, shape))
      return BlockFormat::q8_0;
    if (is_lowest(mix_) || mix_.name == "iq3_xxs") return BlockFormat::q5_k;
    return usual == Encoding(BlockFormat::q8_0) ? usual : Encoding(BlockFormat::q6_k);
  }

  [[nodiscard]] Encoding expert_type(const Shape& shape, Role role) const {
    const auto& extents = shape.extents();
    const bool is_stack = extents.size() >= 3 && extents[extents.size() - 3] > 1;
    const bool is_role = role == Role::ffn_up || role == Role::ffn_gate || role == Role::ffn_down;
    // In this architecture attention projections are stacks too, but they do not become MXFP4.
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

  [[nodiscard]] Encoding by_rule(Role role, unsigned facts, Encoding usual) const {
    const auto* const rule = std::ranges::find_if(mix_rules, [&](const MixRule& each) {
      return each.role == role && (each.when & ~facts) == 0 && is_word(mix_.name, each.mixes);
    });
    return rule == std::end(mix_rules) ? usual : Encoding(rule->type);
  }

  [[nodiscard]] unsigned facts_of(std::uint64_t index, std::uint64_t count) const noexcept {
    const bool is_middle = index >= count / 8 && index < 7 * count / 8;
    unsigned facts = is_falcon() ? falcon : not_falcon;
    facts |= has_importance_ ? importance : no_importance;
    facts |= model_.experts == 8 ? eight_experts : other_experts;
    if (model_.experts >= 4) facts |= four_experts;
    if (model_.kv_heads != 0 && model_.heads / model_.kv_heads >= 4) facts |= grouped;
    if (index < 2) facts |= first_two;
    if (index < 4) facts |= first_four;
    if (index < count / 16) facts |= first_sixteenth;
    if (index < count / 8) facts |= first_eighth;
    if (is_middle) facts |= middle;
    if (!is_middle || (index - count / 8) % 3 == 2) facts |= more_bits;
    return facts;
  }

  [[nodiscard]] bool is_falcon() const noexcept { return model_.architecture == "falcon"; }

  const Mix& mix_;
  const MixModel& model_;
  bool has_importance_;
  std::span<const MixTensor> tensors_;
  std::uint64_t values_ = 0;  // number of tensors of Role::attn_v
  std::uint64_t value_ = 0;   // index of the next tensor of Role::attn_v
  bool is_tied_ = true;       // the output head shares the embedding's tensor
  std::array<std::uint64_t, static_cast<std::size_t>(Role::other) + 1> counters_ = {};
};

// Returns an integer of the metadata, or its first element if it is a list with one element per
// layer.
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

std::span<const Mix> mixes() noexcept { return mix_table; }

const Mix* find_mix(std::string_view name) {
  const auto found = std::ranges::find(mix_table, lowered(name), &Mix::name);
  return found == mix_table.end() ? nullptr : &*found;
}

std::optional<MixModel> mix_model(const Metadata& metadata) {
  const std::string* const architecture = find_text(metadata, "general.architecture");
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
  // ggml does not count leading dims of 1.
  const auto& extents = shape.extents();
  const auto first = std::ranges::find_if(extents, [](std::uint64_t each) { return each != 1; });
  if (extents.end() - first < 2) return false;
  if (!name.ends_with("weight") || has_word(name, plain_parts)) return false;
  if (is_word(name, plain_text_names)) return false;
  return architecture != glm5_next || !has_word(name, glm5_plain_parts);
}

std::vector<Encoding> mixed_types(const Mix& mix, const MixModel& model, bool has_importance,
                                  std::span<const MixTensor> tensors) {
  return Mixer(mix, model, has_importance, tensors).run();
}

bool mix_needs_importance(const Mix* mix, std::string_view name, BlockFormat type) noexcept {
  const Role role = role_of(name);
  if (role == Role::token_embd || role == Role::output) return false;
  if (type == BlockFormat::q2_k) return mix != nullptr && mix->name == "q2_k_s";
  using enum BlockFormat;
  constexpr BlockFormat needing[] = {iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs};
  return std::ranges::find(needing, type) != std::end(needing);
}

bool is_in_mixes(std::string_view name) noexcept { return role_of(name) != Role::other; }

bool is_token_embedding(std::string_view name) noexcept {
  return role_of(name) == Role::token_embd;
}

Encoding fitting_type(Encoding type, const Shape& shape) noexcept {
  if (is_whole(type, shape)) return type;
  const auto* const fallback = std::ranges::find(fallbacks, type.block_format(), &Fallback::type);
  const bool fits = fallback != std::end(fallbacks) && is_whole(fallback->smaller, shape);
  return fits ? Encoding(fallback->smaller) : Encoding(Dtype::f16);
}

}  // namespace loadstone
