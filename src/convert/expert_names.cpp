#include "convert/expert_names.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/pattern.h"
#include "convert/quantize_rules.h"

namespace loadstone {

namespace {

constexpr std::string_view mixtral_block = ".block_sparse_moe.";
constexpr std::string_view usual_block = ".mlp.";
constexpr std::string_view experts_infix = ".experts.";

// By ExpertWords and ExpertRole.
constexpr std::array<std::array<std::string_view, 3>, 2> role_names = {
    {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}}};

std::string with_block(std::string name, std::string_view before, std::string_view after) {
  if (const auto at = name.find(before); at != std::string::npos) {
    name.replace(at, before.size(), after);
  }
  return name;
}

}  // namespace

ExpertNaming expert_naming(std::string_view model_type) {
  const auto is_one_of = [&](std::string_view types) {
    return re2::RE2::FullMatch(piece(model_type), re2::RE2(piece(types)));
  };
  const bool keeps_block = is_one_of(kept_block_types());
  const bool is_mixtral = keeps_block || is_one_of(mixtral_word_types());
  return {is_mixtral ? ExpertWords::mixtral : ExpertWords::usual, !keeps_block};
}

std::string_view name(ExpertRole role, ExpertWords words) noexcept {
  return role_names[static_cast<std::size_t>(words)][static_cast<std::size_t>(role)];
}

std::optional<ExpertName> expert_name(std::string_view name) {
  constexpr std::string_view suffix = ".weight";
  const auto at = name.rfind(experts_infix);
  if (at == std::string_view::npos || !name.ends_with(suffix)) return std::nullopt;
  const std::size_t begin = at + experts_infix.size();
  if (name.size() < begin + suffix.size()) return std::nullopt;
  const std::string_view rest = name.substr(begin, name.size() - begin - suffix.size());
  ExpertName found;
  found.prefix = name.substr(0, begin - 1);
  const char* const end = rest.data() + rest.size();
  const auto [after, problem] = std::from_chars(rest.data(), end, found.expert);
  if (problem != std::errc() || after == end || *after != '.') return std::nullopt;
  const std::string_view role(after + 1, static_cast<std::size_t>(end - after - 1));
  for (const ExpertWords words : {ExpertWords::usual, ExpertWords::mixtral}) {
    for (const ExpertRole known : expert_roles) {
      if (role != loadstone::name(known, words)) continue;
      found.role = known;
      found.words = words;
      return found;
    }
  }
  return std::nullopt;
}

std::string fused_name(std::string name, const ExpertNaming& naming) {
  if (!naming.renames_block) return name;
  return with_block(std::move(name), mixtral_block, usual_block);
}

std::string separate_name(std::string name, const ExpertNaming& naming) {
  if (naming.words == ExpertWords::usual || !naming.renames_block) return name;
  return with_block(std::move(name), usual_block, mixtral_block);
}

std::string_view block_of(std::string_view prefix) noexcept {
  return prefix.substr(0, prefix.rfind('.') + 1);
}

bool is_in_block(const std::set<std::string, std::less<>>& blocks, std::string_view name) {
  const auto after = blocks.upper_bound(name);
  return after != blocks.begin() && name.starts_with(*std::prev(after));
}

}  // namespace loadstone
