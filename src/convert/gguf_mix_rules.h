// Which types tensors of a mix get, by their role: as data.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "convert/gguf_mix.h"

namespace loadstone {

// By broad roles, which are the same in all architectures. Values of attention, whatever they are
// stored with, are one role.
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
[[nodiscard]] Role role_of(std::string_view name) noexcept;

// The facts about a tensor that conditions ask for.
struct Facts {
  std::uint64_t index;  // of the layer, among `count` with a tensor of this role
  std::uint64_t count;
  std::uint64_t groups;  // heads that share one of keys and values
  std::uint64_t experts;
  bool is_falcon;
  bool has_importance;

  // The first and the last eighth of layers, and each third of the others.
  [[nodiscard]] bool needs_more_bits() const noexcept {
    return index < count / 8 || index >= 7 * count / 8 || (index - count / 8) % 3 == 2;
  }
};

struct MixRule {
  Role role;
  Mix mix;
  bool (*when)(const Facts& facts) noexcept;
  BlockFormat type;
};

// The first that fits counts; a tensor that none fits has the type of the mix.
[[nodiscard]] std::span<const MixRule> mix_rules() noexcept;

}  // namespace loadstone
