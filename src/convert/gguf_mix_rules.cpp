#include "convert/gguf_mix_rules.h"

#include <algorithm>
#include <utility>

namespace loadstone {

namespace {

constexpr bool always(const Facts&) noexcept { return true; }
constexpr bool first_two(const Facts& facts) noexcept { return facts.index < 2; }
constexpr bool first_four(const Facts& facts) noexcept { return facts.index < 4; }
constexpr bool first_eighth(const Facts& facts) noexcept { return facts.index < facts.count / 8; }
constexpr bool first_sixteenth(const Facts& facts) noexcept {
  return facts.index < facts.count / 16;
}
constexpr bool middle(const Facts& facts) noexcept {
  return facts.index >= facts.count / 8 && facts.index < 7 * facts.count / 8;
}
bool more_bits(const Facts& facts) noexcept { return facts.needs_more_bits(); }
constexpr bool grouped(const Facts& facts) noexcept { return facts.groups >= 4; }
constexpr bool eight_experts(const Facts& facts) noexcept { return facts.experts == 8; }
constexpr bool not_eight_experts(const Facts& facts) noexcept { return facts.experts != 8; }
constexpr bool no_importance(const Facts& facts) noexcept { return !facts.has_importance; }
constexpr bool falcon(const Facts& facts) noexcept { return facts.is_falcon; }
constexpr bool not_falcon(const Facts& facts) noexcept { return !facts.is_falcon; }

constexpr bool grouped_or_experts(const Facts& facts) noexcept {
  return facts.groups >= 4 || facts.experts >= 4;
}
constexpr bool first_eighth_no_importance(const Facts& facts) noexcept {
  return first_eighth(facts) && no_importance(facts);
}
constexpr bool first_eighth_importance(const Facts& facts) noexcept {
  return first_eighth(facts) && facts.has_importance;
}
constexpr bool first_eighth_not_falcon(const Facts& facts) noexcept {
  return first_eighth(facts) && not_falcon(facts);
}
constexpr bool first_sixteenth_falcon(const Facts& facts) noexcept {
  return first_sixteenth(facts) && falcon(facts);
}
bool more_bits_not_falcon(const Facts& facts) noexcept {
  return more_bits(facts) && not_falcon(facts);
}
bool more_bits_falcon(const Facts& facts) noexcept { return more_bits(facts) && falcon(facts); }
bool not_falcon_or_more_bits(const Facts& facts) noexcept {
  return not_falcon(facts) || more_bits(facts);
}
bool first_eighth_or_experts(const Facts& facts) noexcept {
  return first_eighth(facts) || (eight_experts(facts) && more_bits(facts));
}
constexpr bool eight_experts_not_falcon(const Facts& facts) noexcept {
  return eight_experts(facts) && not_falcon(facts);
}
constexpr bool plain_output(const Facts& facts) noexcept {
  return not_eight_experts(facts) && not_falcon(facts);
}

constexpr MixRule all_mix_rules[] = {
    {Role::token_embd, Mix::iq2_xxs, always, BlockFormat::q2_k},
    {Role::token_embd, Mix::iq2_xs, always, BlockFormat::q2_k},
    {Role::token_embd, Mix::iq1_s, always, BlockFormat::q2_k},
    {Role::token_embd, Mix::iq1_m, always, BlockFormat::q2_k},
    {Role::token_embd, Mix::iq2_s, always, BlockFormat::iq3_s},
    {Role::token_embd, Mix::iq2_m, always, BlockFormat::iq3_s},
    {Role::token_embd, Mix::iq3_xxs, always, BlockFormat::iq3_s},
    {Role::token_embd, Mix::tq1_0, always, BlockFormat::q4_k},
    {Role::token_embd, Mix::tq2_0, always, BlockFormat::q4_k},

    {Role::attn_v, Mix::q2_k, grouped, BlockFormat::q4_k},
    {Role::attn_v, Mix::q2_k, always, BlockFormat::q3_k},
    {Role::attn_v, Mix::q2_k_s, grouped, BlockFormat::q4_k},
    {Role::attn_v, Mix::q3_k_m, first_two, BlockFormat::q5_k},
    {Role::attn_v, Mix::q3_k_m, always, BlockFormat::q4_k},
    {Role::attn_v, Mix::q3_k_l, always, BlockFormat::q5_k},
    {Role::attn_v, Mix::q4_k_s, first_four, BlockFormat::q5_k},
    {Role::attn_v, Mix::q4_k_m, more_bits, BlockFormat::q6_k},
    {Role::attn_v, Mix::q5_k_m, more_bits, BlockFormat::q6_k},
    {Role::attn_v, Mix::iq1_s, grouped_or_experts, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq1_s, always, BlockFormat::q2_k},
    {Role::attn_v, Mix::iq1_m, grouped_or_experts, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq1_m, always, BlockFormat::q2_k},
    {Role::attn_v, Mix::iq2_xxs, grouped_or_experts, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq2_xxs, always, BlockFormat::q2_k},
    {Role::attn_v, Mix::iq2_xs, grouped_or_experts, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq2_xs, always, BlockFormat::q2_k},
    {Role::attn_v, Mix::iq2_s, grouped_or_experts, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq2_s, always, BlockFormat::iq3_s},
    {Role::attn_v, Mix::iq2_m, grouped_or_experts, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq2_m, always, BlockFormat::iq3_s},
    {Role::attn_v, Mix::iq3_xxs, grouped, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq3_xxs, no_importance, BlockFormat::iq3_s},
    {Role::attn_v, Mix::iq3_xs, grouped, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq3_s, grouped, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq3_m, always, BlockFormat::q4_k},
    {Role::attn_v, Mix::iq4_nl, grouped, BlockFormat::q5_k},
    {Role::attn_v, Mix::iq4_xs, grouped, BlockFormat::q5_k},

    {Role::attn_k, Mix::iq3_xs, always, BlockFormat::iq3_xxs},
    {Role::attn_k, Mix::iq3_xxs, always, BlockFormat::iq2_s},
    {Role::attn_q, Mix::iq3_xs, always, BlockFormat::iq3_xxs},
    {Role::attn_q, Mix::iq3_xxs, always, BlockFormat::iq2_s},

    {Role::ffn_down, Mix::q2_k, always, BlockFormat::q3_k},
    {Role::ffn_down, Mix::q2_k_s, first_eighth, BlockFormat::q4_k},
    {Role::ffn_down, Mix::q3_k_m, first_sixteenth, BlockFormat::q5_k},
    {Role::ffn_down, Mix::q3_k_m, not_falcon_or_more_bits, BlockFormat::q4_k},
    {Role::ffn_down, Mix::q3_k_l, falcon, BlockFormat::q4_k},
    {Role::ffn_down, Mix::q3_k_l, always, BlockFormat::q5_k},
    {Role::ffn_down, Mix::q4_k_s, first_eighth_not_falcon, BlockFormat::q5_k},
    {Role::ffn_down, Mix::q4_k_m, first_sixteenth_falcon, BlockFormat::q6_k},
    {Role::ffn_down, Mix::q4_k_m, more_bits_falcon, BlockFormat::q5_k},
    {Role::ffn_down, Mix::q4_k_m, more_bits_not_falcon, BlockFormat::q6_k},
    {Role::ffn_down, Mix::q5_k_m, more_bits, BlockFormat::q6_k},
    {Role::ffn_down, Mix::q4_0, first_eighth_importance, BlockFormat::q4_1},
    {Role::ffn_down, Mix::q5_0, first_eighth_importance, BlockFormat::q5_1},
    {Role::ffn_down, Mix::iq1_s, first_eighth, BlockFormat::q2_k},
    {Role::ffn_down, Mix::iq1_m, first_eighth, BlockFormat::q2_k},
    {Role::ffn_down, Mix::iq2_xxs, first_eighth, BlockFormat::q2_k},
    {Role::ffn_down, Mix::iq2_xs, first_eighth, BlockFormat::q2_k},
    {Role::ffn_down, Mix::iq2_s, first_eighth, BlockFormat::iq3_s},
    {Role::ffn_down, Mix::iq2_m, first_eighth, BlockFormat::iq3_s},
    {Role::ffn_down, Mix::iq3_xxs, first_eighth_no_importance, BlockFormat::q4_k},
    {Role::ffn_down, Mix::iq3_xxs, no_importance, BlockFormat::q3_k},
    {Role::ffn_down, Mix::iq3_m, first_eighth_or_experts, BlockFormat::q4_k},
    {Role::ffn_down, Mix::iq4_nl, first_eighth_no_importance, BlockFormat::q5_k},
    {Role::ffn_down, Mix::iq4_xs, first_eighth_no_importance, BlockFormat::q5_k},

    {Role::ffn_gate, Mix::iq3_xs, middle, BlockFormat::iq3_xxs},
    {Role::ffn_up, Mix::iq3_xs, middle, BlockFormat::iq3_xxs},

    {Role::attn_output, Mix::q2_k, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::q2_k, plain_output, BlockFormat::q3_k},
    {Role::attn_output, Mix::q3_k_s, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::q3_k_m, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::q3_k_m, plain_output, BlockFormat::q4_k},
    {Role::attn_output, Mix::q3_k_l, plain_output, BlockFormat::q5_k},
    {Role::attn_output, Mix::q3_k_l, falcon, BlockFormat::q4_k},
    {Role::attn_output, Mix::q4_k_s, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::q4_k_m, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq3_xxs, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq3_xxs, plain_output, BlockFormat::iq3_s},
    {Role::attn_output, Mix::iq3_xs, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq3_s, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq3_m, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq3_m, plain_output, BlockFormat::q4_k},
    {Role::attn_output, Mix::iq4_nl, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq4_xs, eight_experts_not_falcon, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq1_s, eight_experts, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq1_s, always, BlockFormat::iq2_xxs},
    {Role::attn_output, Mix::iq1_m, eight_experts, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq1_m, always, BlockFormat::iq2_xxs},
    {Role::attn_output, Mix::iq2_xxs, eight_experts, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq2_xs, eight_experts, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq2_s, eight_experts, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq2_s, always, BlockFormat::iq3_s},
    {Role::attn_output, Mix::iq2_m, eight_experts, BlockFormat::q5_k},
    {Role::attn_output, Mix::iq2_m, always, BlockFormat::iq3_s},
};

}  // namespace

Role role_of(std::string_view name) noexcept {
  if (name == "output.weight") return Role::output;
  if (name == "token_embd.weight" || name == "per_layer_token_embd.weight") return Role::token_embd;
  // The first part that is found says it.
  constexpr std::pair<std::string_view, Role> parts[] = {
      {"attn_qkv.weight", Role::attn_v}, {"attn_kv_b.weight", Role::attn_v},
      {"attn_v.weight", Role::attn_v},   {"attn_k.weight", Role::attn_k},
      {"attn_q.weight", Role::attn_q},   {"attn_output.weight", Role::attn_output},
      {"ffn_up", Role::ffn_up},          {"ffn_gate", Role::ffn_gate},
      {"ffn_down", Role::ffn_down},
  };
  for (const auto& [part, role] : parts) {
    if (name.find(part) != std::string_view::npos) return role;
  }
  return Role::other;
}

std::span<const MixRule> mix_rules() noexcept { return all_mix_rules; }

}  // namespace loadstone
