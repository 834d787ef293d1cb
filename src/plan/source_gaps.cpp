// Finds the missing sources of a stack or concat, and their expected names.
#include <algorithm>
#include <functional>
#include <optional>
#include <unordered_set>

#include "base/text.h"
#include "catalog/lacking.h"
#include "catalog/series.h"
#include "loadstone/name_hash.h"
#include "plan/produce.h"

namespace loadstone {

namespace {

// Returns the groups that distinguish the sources of one target, joined to one string.
std::string key_of(const Member& member, const Template& target) {
  std::string key;
  for (std::size_t g = 0; g < member.groups.size(); ++g) {
    if (!target.uses(g + 1)) key += std::string(member.groups[g]) + '\n';
  }
  return key;
}

// Returns the only group that the target does not use. Returns nullopt if there is no such group,
// or more than one.
std::optional<std::size_t> counting_group(const Member& member, const Template& target) {
  std::optional<std::size_t> found;
  for (std::size_t g = 0; g < member.groups.size(); ++g) {
    if (target.uses(g + 1)) continue;
    if (found) return std::nullopt;
    found = g;
  }
  return found;
}

// Returns the name with `number` in place of the number that the regex group `group` matched.
std::string renumbered(std::string_view name, std::string_view group, std::uint64_t number) {
  std::string result(name);
  const auto begin = static_cast<std::size_t>(group.data() - name.data());
  return result.replace(begin, group.size(), std::to_string(number));
}

// Returns the number of sources per pattern that the shape of the target requires, or 0 if it is
// unknown.
std::uint64_t expected_count(const Rule& rule, const Shape& shape) {
  const bool stacks =
      rule.op == RuleOp::stack_concat || (rule.op == RuleOp::stack && rule.sources.size() == 1);
  if (!stacks || !rule.then.empty()) return 0;
  const auto dim = dim_index(rule.dims[0], shape.rank());
  if (!dim) return 0;
  const bool is_joined_there =
      rule.op == RuleOp::stack_concat && dim_index(rule.dims[1], shape.rank()) == dim;
  return is_joined_there ? shape[*dim] / rule.sources.size() : shape[*dim];
}

// Finds the missing sources of one target. Used once. Not thread-safe.
class GapFinder {
 public:
  GapFinder(const CompiledRules& rules, const Produced& item)
      : rules_(rules),
        rule_(rules.rules()[item.rule]),
        item_(item),
        examples_(rule_.patterns.size(), nullptr),
        partner_of_(rule_.patterns.size(), none) {}

  SeriesGaps run(const Shape& shape) && {
    const Template& target = rule_.targets[item_.part];
    for (const Member& member : item_.members) {
      if (examples_[member.pattern] == nullptr) examples_[member.pattern] = &member;
      const auto group = counting_group(member, target);
      if (group && is_digits(member.groups[*group])) add_numbered(member, member.groups[*group]);
    }
    find_unmatched(target);
    if (!series_.empty()) find_numbers(shape);
    return std::move(gaps_);
  }

 private:
  static constexpr std::uint32_t none = UINT32_MAX;

  void add_numbered(const Member& member, std::string_view number) {
    std::uint32_t& partner = partner_of_[member.pattern];
    if (partner == none) {
      partner = static_cast<std::uint32_t>(first_of_.size());
      first_of_.push_back(numbered_.size());
    }
    series_.push_back({partner, number});
    numbered_.push_back(&member);
  }

  void add_absent(std::string name) {
    ++gaps_.absent_count;
    if (gaps_.absent.size() < series_listed_max(item_.members.size())) {
      gaps_.absent.push_back(std::move(name));
    }
  }

  // Finds patterns without a match, and non-numeric keys that only some patterns have.
  void find_unmatched(const Template& target) {
    const bool wants_all = rule_.rule.op == RuleOp::stack_concat;
    std::vector<std::unordered_set<std::string, NameHash, std::equal_to<>>> has(
        rule_.patterns.size());
    std::vector<std::pair<std::string, const Member*>> keys;
    const bool is_whole = std::ranges::none_of(examples_, [](auto* each) { return !each; });
    const bool are_series =
        std::ranges::none_of(partner_of_, [](auto each) { return each == none; });
    if (is_whole && (are_series || !wants_all)) return;
    std::unordered_set<std::string, NameHash, std::equal_to<>> known;
    for (const Member& member : item_.members) {
      std::string key = key_of(member, target);
      if (known.insert(key).second) keys.emplace_back(key, &member);
      has[member.pattern].insert(std::move(key));
    }
    for (std::size_t p = 0; p < rule_.patterns.size(); ++p) {
      if (!(wants_all && partner_of_[p] == none) && examples_[p] != nullptr) continue;
      for (const auto& [key, member] : keys) {
        if (has[p].contains(key)) continue;
        std::string name = fill_pattern(*rule_.patterns[p], member->groups);
        add_absent(name.empty() ? "a match of " + rule_.patterns[p]->pattern() : std::move(name));
        if (!wants_all) break;
      }
    }
  }

  // Returns the name of the partner's tensor with this number, or an empty string if the rule would
  // not match that name.
  [[nodiscard]] std::string name_of(std::uint32_t partner, std::uint64_t number) const {
    const std::size_t first = first_of_[partner];
    const Member& example = *numbered_[first];
    std::string name = renumbered(example.name, series_[first].number, number);
    RuleMatch match;
    const bool is_found =
        rules_.match(name, match) && match.rule == item_.rule && match.pattern == example.pattern;
    return is_found ? name : std::string();
  }

  // Returns the first expected number. Numbers may start at 1 instead of 0 if the count is
  // complete. A pattern such as (1[2-9]) cannot match 0, so its numbers start at the smallest
  // existing one.
  [[nodiscard]] std::uint64_t first_number(std::uint64_t count) const {
    std::uint64_t first = UINT64_MAX;
    for (const SeriesMember& member : series_) {
      first = std::min(first, series_number(member.number).value_or(UINT64_MAX));
    }
    if (first == UINT64_MAX || first == 0) return 0;
    const bool is_short = series_.size() / first_of_.size() < count;
    if (first == 1 && !is_short) return 1;
    return name_of(0, 0).empty() ? first : 0;
  }

  void find_numbers(const Shape& shape) {
    const std::uint64_t count = expected_count(rule_.rule, shape);
    const auto check = check_series(series_, static_cast<std::uint32_t>(first_of_.size()),
                                    {.count = count, .first = first_number(count)});
    for (const SeriesGap& gap : check.absent) {
      std::string name = name_of(gap.partner, gap.number);
      if (!name.empty()) add_absent(std::move(name));
    }
    if (!gaps_.absent.empty()) gaps_.absent_count += check.absent_count - check.absent.size();
    for (const std::size_t stray : check.stray) {
      gaps_.stray.emplace_back(numbered_[stray]->name);
    }
  }

  const CompiledRules& rules_;
  const CompiledRule& rule_;
  const Produced& item_;
  std::vector<const Member*> examples_;    // by pattern
  std::vector<std::uint32_t> partner_of_;  // by pattern
  std::vector<std::size_t> first_of_;      // by partner: index of its first member in series_
  std::vector<SeriesMember> series_;
  std::vector<const Member*> numbered_;  // by index into series_
  SeriesGaps gaps_;
};

}  // namespace

SeriesGaps Production::source_gaps(const Produced& item, const Shape& shape) const {
  if (item.rule == Produced::none || !joins_sources(rules_.rules()[item.rule].rule.op)) return {};
  return GapFinder(rules_, item).run(shape);
}

}  // namespace loadstone
