#include "plan/produce.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/natural_order.h"
#include "boxes/decodings.h"
#include "codec/gguf/gguf.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

Production::Production(const Catalog& catalog, const CompiledRules& rules,
                       const PlanOptions& options)
    : catalog_(catalog), rules_(rules) {
  const auto& tensors = catalog.tensors();
  index_.reserve(tensors.size());
  std::vector<bool> taken(tensors.size(), false);
  add_recipes(options.recipes, taken);
  for (const std::string& name : options.caller.known_sources) {
    if (const auto known = catalog.find(name)) taken[*known] = true;
  }
  // A constant replaces the source of the same name, unless a rule uses that source.
  for (const TargetRecipe& recipe : options.recipes.targets) {
    RuleMatch match;
    if (recipe.constant == nullptr || rules.match(recipe.target, match)) continue;
    if (const auto known = catalog.find(recipe.target)) taken[*known] = true;
  }
  // Only the first checkpoint determines names. The other checkpoints are read by recipes alone.
  const std::uint32_t end = catalog.tensors_of(0).end;
  for (std::uint32_t i = 0; i < end && !options.caller.knows_all_sources; ++i) {
    if (!taken[i]) add_named({.source = i, .name = tensors[i].name});
  }
  // Adds decoded tensors whose names are not in the file, such as "experts.down_proj" for
  // "experts.down_proj_blocks".
  for (const QuantizedTensor& each : catalog.quantized().tensors()) {
    const bool has_own_name = each.data < end && tensors[each.data].name != each.name;
    if (!has_own_name || taken[each.data] || options.caller.knows_all_sources) continue;
    add_named({.source = each.data, .name = each.name, .is_numbers = true});
  }
  order_members();
}

void Production::add_named(Member member) {
  RuleMatch match;
  if (rules_.match(member.name, match)) {
    add_match(std::move(member), match);
  } else {
    std::string name(member.name);
    add(std::move(name), Produced::none, 0, std::move(member), false);
  }
}

void Production::add_recipes(const Recipes& recipes, std::vector<bool>& taken) {
  for (std::uint32_t r = 0; r < recipes.targets.size(); ++r) {
    const TargetRecipe& recipe = recipes.targets[r];
    Produced item;
    item.name = recipe.target;
    item.recipe = r;
    for (const std::uint32_t source : sources_of(recipe, recipes.decodings)) {
      if (source >= taken.size()) continue;
      taken[source] = true;
      item.members.push_back({.source = source, .name = catalog_.tensors()[source].name});
    }
    items_.push_back(std::move(item));
    if (!index_.emplace(items_.back().name, items_.size() - 1).second) {
      throw Error("plan.options", "two recipes make the same target",
                  {.tensor = recipe.target, .field = "recipes"});
    }
  }
}

void Production::add_match(Member member, const RuleMatch& match) {
  const CompiledRule& rule = rules_.rules()[match.rule];
  ++matches_[{match.rule, match.pattern}];
  member.pattern = match.pattern;
  member.groups = match.groups;
  const bool joins = joins_sources(rule.rule.op);
  for (std::uint32_t part = 0; part < rule.targets.size(); ++part) {
    add(rule.targets[part].fill(match.groups), match.rule, part, member, joins);
  }
}

void Production::add(std::string name, std::uint32_t rule, std::uint32_t part, Member member,
                     bool joins) {
  const auto found = index_.find(name);
  if (found != index_.end()) {
    Produced& item = items_[found->second];
    if (joins && item.rule == rule) {
      item.members.push_back(std::move(member));
    } else {
      contests_.push_back({found->second, {member.source}});
    }
    return;
  }
  Produced item;
  item.name = std::move(name);
  item.rule = rule;
  item.part = part;
  item.members.push_back(std::move(member));
  items_.push_back(std::move(item));
  index_.emplace(items_.back().name, items_.size() - 1);
}

void Production::order_members() {
  for (Produced& item : items_) {
    if (item.members.size() < 2 || item.rule == Produced::none) continue;
    const Template& target = rules_.rules()[item.rule].targets[item.part];
    std::ranges::sort(item.members, [&](const Member& a, const Member& b) {
      if (a.pattern != b.pattern) return a.pattern < b.pattern;
      for (std::size_t g = 0; g < std::min(a.groups.size(), b.groups.size()); ++g) {
        if (target.uses(g + 1)) continue;
        const auto order = natural_order(a.groups[g], b.groups[g]);
        if (order != 0) return order < 0;
      }
      return natural_order(a.name, b.name) < 0;
    });
  }
}

std::vector<std::size_t> Production::matches() const {
  std::vector<std::size_t> counts;
  for (std::uint32_t r = 0; r < rules_.rules().size(); ++r) {
    for (std::uint32_t p = 0; p < rules_.rules()[r].patterns.size(); ++p) {
      const auto found = matches_.find({r, p});
      counts.push_back(found == matches_.end() ? 0 : found->second);
    }
  }
  return counts;
}

Produced* Production::find(std::string_view name) {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &items_[found->second];
}

bool Production::is_whole(const Produced& item) const {
  if (item.recipe != Produced::none || item.members.size() != 1) return false;
  if (item.rule == Produced::none) return true;
  const Rule& rule = rules_.rules()[item.rule].rule;
  return rule.op == RuleOp::rename && rule.then.empty();
}

View Production::member_view(const Member& member) const {
  const TensorInfo& tensor = catalog_.tensors()[member.source];
  if (!member.is_numbers) {
    return tensor.encoding.is_dtype()
               ? source_view(member.source, tensor)
               : whole_view(member.source, shape_of_bytes(tensor.encoding, tensor.shape));
  }
  return numbers_view(catalog_, member.source, numbers_begin() + member.source);
}

std::optional<Problem> Production::view_of(const Produced& item, View& view) const {
  view = member_view(item.members.front());
  if (item.rule == Produced::none) return std::nullopt;
  const Rule& rule = rules_.rules()[item.rule].rule;
  std::optional<Problem> misfit;
  if (joins_sources(rule.op)) {
    misfit = joined_view(item, rule, view);
  } else if (rule.op == RuleOp::split) {
    misfit = split_view(item, rule, view);
  } else {
    misfit = apply_step({rule.op, rule.dims, rule.sizes, rule.start}, view);
  }
  std::string_view step = name(rule.op);
  for (std::size_t i = 0; i < rule.then.size() && !misfit; ++i) {
    misfit = apply_step(rule.then[i], view);
    step = name(rule.then[i].op);
  }
  if (misfit) misfit->message = fmt::format("rule {} ({}): {}", item.rule, step, misfit->message);
  return misfit;
}

std::optional<Problem> Production::joined_view(const Produced& item, const Rule& rule,
                                               View& view) const {
  std::vector<View> joined;
  std::vector<View> parts;
  for (std::size_t i = 0; i < item.members.size(); ++i) {
    const Member& member = item.members[i];
    parts.push_back(member_view(member));
    const bool is_last =
        i + 1 == item.members.size() || item.members[i + 1].pattern != member.pattern;
    if (rule.op != RuleOp::stack_concat || !is_last) continue;
    if (auto misfit = stack(std::exchange(parts, {}), rule.dims[0], joined.emplace_back())) {
      return misfit;
    }
  }
  if (rule.op == RuleOp::stack) return stack(std::move(parts), rule.dims[0], view);
  if (rule.op == RuleOp::concat) return concat(std::move(parts), rule.dims[0], view);
  return concat(std::move(joined), rule.dims[1], view);
}

std::optional<Problem> Production::split_view(const Produced& item, const Rule& rule,
                                              View& view) const {
  const auto dim = dim_index(rule.dims[0], view.shape.rank());
  if (!dim) {
    return Problem{fmt::format("dimension {} does not exist", rule.dims[0]), view.shape.text()};
  }
  const std::uint64_t extent = view.shape[*dim];
  const std::size_t parts = rule.targets.size();
  std::uint64_t start = 0;
  std::uint64_t size = 0;
  if (rule.sizes.empty()) {
    if (extent % parts != 0) {
      return Problem{
          fmt::format("dimension {} cannot be divided into {} equal parts", rule.dims[0], parts),
          view.shape.text()};
    }
    size = extent / parts;
    start = item.part * size;
  } else {
    std::uint64_t rest = extent;
    for (std::size_t i = 0; i < parts; ++i) {
      if (rule.sizes[i] > rest || (i + 1 == parts && rule.sizes[i] != rest)) {
        return Problem{fmt::format("the sum of the sizes differs from dimension {}", rule.dims[0]),
                       view.shape.text(), fmt::format("{}", fmt::join(rule.sizes, " + "))};
      }
      if (i == item.part) start = extent - rest;
      rest -= rule.sizes[i];
    }
    size = rule.sizes[item.part];
  }
  return slice(view, rule.dims[0], start, size);
}

std::vector<std::string> Production::source_names(const Produced& item) const {
  std::vector<std::string> names;
  names.reserve(item.members.size());
  for (const Member& member : item.members) names.push_back(catalog_.tensors()[member.source].name);
  return names;
}

}  // namespace loadstone
