#include "catalog/expert_series.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "base/pattern.h"
#include "base/text.h"
#include "catalog/lacking.h"
#include "catalog/series.h"

namespace loadstone {

namespace {

// Maximum number of partners for check_kinds(), whose time grows with the square of this number. An
// expert has only a few partners.
constexpr std::size_t partners_max = 64;

// "model.layers.0.mlp.experts.3.up_proj.weight"
struct Place {
  std::string_view prefix;   // "model.layers.0.mlp.experts"
  std::string_view number;   // "3"
  std::string_view partner;  // "up_proj", or "up_proj.bias"
};

std::optional<Place> place_of(std::string_view name) {
  constexpr std::string_view infix = ".experts.";
  const auto at = name.rfind(infix);
  // Skips LoRA adapters, which need not have a weight for each expert.
  if (at == std::string_view::npos || name.find(".lora_") != std::string_view::npos) {
    return std::nullopt;
  }
  Place place;
  place.prefix = name.substr(0, at + infix.size() - 1);
  const std::string_view rest = name.substr(at + infix.size());
  const auto dot = rest.find('.');
  place.number = rest.substr(0, dot);
  if (dot == std::string_view::npos || !is_digits(place.number)) return std::nullopt;
  place.partner = rest.substr(dot + 1);
  if (place.partner.ends_with(".bias")) return place;
  // Checks only names of weights, because experts that are not quantized have no scales or states.
  for (const std::string_view suffix : {".weight", ".weight_packed", ".qweight"}) {
    if (!place.partner.ends_with(suffix)) continue;
    place.partner.remove_suffix(suffix.size());
    return place;
  }
  return std::nullopt;
}

// The experts of one layer. The views point into the catalog's names.
struct Layer {
  std::map<std::string_view, std::uint32_t> partners;
  std::vector<std::uint32_t> first_of;  // for each partner, the index of its first member
  std::vector<SeriesMember> members;
  std::vector<std::uint32_t> tensors;  // catalog index of each member
};

// Recognises a partial checkpoint by its shard names "NAME-00002-of-00003".
bool is_partial(const Catalog& catalog) {
  static const re2::RE2 pattern(R"(-\d{5,}-of-(\d{5,18})\.)");
  return std::ranges::any_of(catalog.shards(), [&](const Shard& shard) {
    const std::string_view path = shard.path;
    std::uint64_t count = 0;
    return re2::RE2::PartialMatch(piece(path), pattern, &count) && count != catalog.shards().size();
  });
}

// Groups partners into kinds: two partners are of one kind if an expert has both, directly or
// through other experts. Returns, for each partner, the first partner of its kind. An expert of a
// different architecture shares no partner with the others.
std::vector<std::uint32_t> kinds_of(const Layer& layer) {
  std::vector<std::uint32_t> kinds(layer.partners.size());
  std::iota(kinds.begin(), kinds.end(), std::uint32_t{0});
  std::map<std::string_view, std::uint32_t> kind_of;  // by number
  for (const SeriesMember& member : layer.members) {
    const std::uint32_t mine = kinds[member.partner];
    const std::uint32_t other = kind_of.try_emplace(member.number, mine).first->second;
    const std::uint32_t merged = std::min(kinds[other], mine);
    const std::uint32_t replaced = std::max(kinds[other], mine);
    std::ranges::replace(kinds, replaced, merged);
  }
  return kinds;
}

// Like check_series(), except that an expert needs only the partners of its kind.
SeriesCheck check_kinds(const Layer& layer, std::uint64_t first) {
  const auto partners = static_cast<std::uint32_t>(layer.partners.size());
  SeriesCheck check = check_series(layer.members, partners, {.first = first});
  if (check.ok() || partners > partners_max) return check;
  const std::vector<std::uint32_t> kinds = kinds_of(layer);
  std::map<std::uint64_t, std::uint32_t> kind_of;
  for (const SeriesMember& member : layer.members) {
    if (const auto number = series_number(member.number)) {
      kind_of.emplace(*number, kinds[member.partner]);
    }
  }
  const auto is_foreign = [&](const SeriesGap& gap) {
    const auto known = kind_of.find(gap.number);
    return known != kind_of.end() && known->second != kinds[gap.partner];
  };
  check.absent_count -= std::erase_if(check.absent, is_foreign);
  if (check.absent.empty()) check.absent_count = 0;
  return check;
}

// Returns the number of the first expert if it is the same in all layers and no expert after it is
// missing; otherwise 0. The number is above 0 in one rank's share of a model.
std::uint64_t common_first(const std::map<std::string_view, Layer>& layers) {
  std::optional<std::uint64_t> common;
  for (const auto& [prefix, layer] : layers) {
    std::uint64_t first = UINT64_MAX;
    for (const SeriesMember& member : layer.members) {
      first = std::min(first, series_number(member.number).value_or(0));
    }
    if (first == 0 || common.value_or(first) != first) return 0;
    common = first;
  }
  const std::uint64_t first = common.value_or(0);
  const bool is_whole = std::ranges::all_of(
      layers, [&](const auto& layer) { return check_kinds(layer.second, first).ok(); });
  return is_whole ? first : 0;
}

SeriesGaps gaps_of(const Catalog& catalog, std::string_view prefix, const Layer& layer,
                   const SeriesCheck& check) {
  SeriesGaps gaps = {.absent_count = check.absent_count};
  for (std::size_t i = 0; i < std::min(check.absent.size(), gap_names_max); ++i) {
    const SeriesGap& gap = check.absent[i];
    const std::uint32_t like = layer.first_of[gap.partner];
    std::string name = catalog.tensors()[layer.tensors[like]].name;
    name.replace(prefix.size() + 1, layer.members[like].number.size(), std::to_string(gap.number));
    gaps.absent.push_back(std::move(name));
  }
  for (std::size_t i = 0; i < std::min(check.stray.size(), gap_names_max); ++i) {
    gaps.stray.push_back(catalog.tensors()[layer.tensors[check.stray[i]]].name);
  }
  return gaps;
}

}  // namespace

std::set<std::string, std::less<>> check_expert_series(const Catalog& catalog,
                                                       std::vector<Finding>& findings) {
  std::map<std::string_view, Layer> layers;
  for (std::uint32_t i = 0; i < catalog.tensors_of(0).end; ++i) {
    const auto place = place_of(catalog.tensors()[i].name);
    if (!place) continue;
    Layer& layer = layers[place->prefix];
    const auto [partner, is_new] = layer.partners.try_emplace(
        place->partner, static_cast<std::uint32_t>(layer.partners.size()));
    if (is_new) layer.first_of.push_back(static_cast<std::uint32_t>(layer.members.size()));
    layer.members.push_back({partner->second, place->number});
    layer.tensors.push_back(i);
  }
  std::set<std::string, std::less<>> broken;
  LackingSeries lacking;
  const std::uint64_t first = common_first(layers);
  const bool is_share = first > 0 || is_partial(catalog);
  for (const auto& [prefix, layer] : layers) {
    const SeriesCheck check = check_kinds(layer, 0);
    if (check.ok()) continue;
    lacking.add(prefix, gaps_of(catalog, prefix, layer, check));
    broken.emplace(prefix);
  }
  for (Finding& finding : lacking.findings()) {
    finding.severity = is_share ? Severity::warning : Severity::error;
    if (first > 0) {
      finding.message += fmt::format(
          "; each layer's experts begin at {}, as in one rank's share of the model", first);
    }
    findings.push_back(std::move(finding));
  }
  return broken;
}

std::uint64_t cut_experts_max(const Catalog& catalog) noexcept {
  constexpr std::uint64_t always = 16'384;
  constexpr std::uint64_t bytes_each = 4096;
  std::uint64_t bytes = 0;  // of files, because views may refer to the same bytes repeatedly
  for (const Shard& shard : catalog.shards()) bytes += shard.identity.bytes / bytes_each;
  return always + bytes;
}

}  // namespace loadstone
