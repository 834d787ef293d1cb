// Which sources of a stack or concat are not there, and what they would be called.
#include <algorithm>
#include <set>

#include "plan/natural_order.h"
#include "plan/produce.h"

namespace loadstone {

namespace {

constexpr std::size_t absent_max = 4096;

// The groups that tell the sources of one target apart, as one text.
std::string key_of(const Member& member, const Template& target) {
  std::string key;
  for (std::size_t g = 0; g < member.groups.size(); ++g) {
    if (!target.uses(g + 1)) key += std::string(member.groups[g]) + '\n';
  }
  return key;
}

// The one group that the target does not use; nothing where there are none or several.
std::optional<std::size_t> counting_group(const Member& member, const Template& target) {
  std::optional<std::size_t> found;
  for (std::size_t g = 0; g < member.groups.size(); ++g) {
    if (target.uses(g + 1)) continue;
    if (found) return std::nullopt;
    found = g;
  }
  return found;
}

// The member's name with another number in its counting group.
std::string renumbered(const std::string& name, std::string_view group, unsigned number) {
  std::string result = name;
  const auto begin = static_cast<std::size_t>(group.data() - name.data());
  return result.replace(begin, group.size(), std::to_string(number));
}

// Numbers left out among those of a pattern's members, and behind them if `expected` are wanted.
std::vector<unsigned> gaps(const std::set<unsigned>& numbers, std::uint64_t expected) {
  std::vector<unsigned> left_out;
  // Counting from 1 is as good as from 0, where nothing is short.
  const bool is_short = numbers.size() < expected;
  unsigned next = is_short && *numbers.begin() != 1 ? 0 : *numbers.begin();
  for (const unsigned number : numbers) {
    for (; next < number && left_out.size() < absent_max; ++next) left_out.push_back(next);
    next = number + 1;
  }
  while (numbers.size() + left_out.size() < expected && left_out.size() < absent_max) {
    left_out.push_back(next++);
  }
  return left_out;
}

// How many sources of each pattern the model's shape asks for; 0: not known.
std::uint64_t expected_count(const Rule& rule, const Shape& shape) {
  const bool stacks =
      rule.op == RuleOp::stack_concat || (rule.op == RuleOp::stack && rule.sources.size() == 1);
  if (!stacks || !rule.then.empty()) return 0;
  const auto dim = dim_index(rule.dims[0], shape.rank());
  return dim ? shape[*dim] : 0;
}

// Whether the members, which are in order, are numbered without a gap, alike for all patterns.
// False says nothing; that this is seen at a glance matters for tens of thousands of experts.
bool is_plainly_complete(const CompiledRule& rule, const Produced& item, std::uint64_t expected) {
  const Template& target = rule.targets[item.part];
  std::optional<unsigned> first;
  std::size_t count = 0;
  std::size_t at = 0;
  for (std::uint32_t pattern = 0; pattern < rule.patterns.size(); ++pattern) {
    const std::size_t begin = at;
    unsigned next = 0;
    for (; at < item.members.size() && item.members[at].pattern == pattern; ++at) {
      const Member& member = item.members[at];
      const auto group = counting_group(member, target);
      const auto number = group ? whole_number(member.groups[*group]) : std::nullopt;
      if (!number || (at > begin && *number != next)) return false;
      if (at == begin && first.value_or(*number) != *number) return false;
      if (!first) first = *number;
      next = *number + 1;
    }
    if (pattern > 0 && at - begin != count) return false;
    count = at - begin;
    if (count == 0 || count < expected) return false;
  }
  return at == item.members.size();
}

}  // namespace

std::vector<std::string> Production::absent_sources(const Produced& item,
                                                    const Shape& shape) const {
  std::vector<std::string> absent;
  if (item.rule == Produced::none || !joins_sources(rules_.rules()[item.rule].rule.op))
    return absent;
  const CompiledRule& rule = rules_.rules()[item.rule];
  const std::uint64_t expected = expected_count(rule.rule, shape);
  if (is_plainly_complete(rule, item, expected)) return absent;
  const Template& target = rule.targets[item.part];
  // By key one member that has it, and by pattern the keys and numbers that it has.
  std::vector<std::pair<std::string, const Member*>> keys;
  std::vector<std::set<std::string>> has(rule.patterns.size());
  std::vector<std::set<unsigned>> numbers(rule.patterns.size());
  std::vector<const Member*> examples(rule.patterns.size(), nullptr);
  std::set<std::string> known;
  for (const Member& member : item.members) {
    std::string key = key_of(member, target);
    if (known.insert(key).second) keys.emplace_back(key, &member);
    has[member.pattern].insert(std::move(key));
    examples[member.pattern] = &member;
    const auto group = counting_group(member, target);
    const auto number = group ? whole_number(member.groups[*group]) : std::nullopt;
    if (number) numbers[member.pattern].insert(*number);
  }
  for (std::size_t p = 0; p < rule.patterns.size(); ++p) {
    const bool wants_all = rule.rule.op == RuleOp::stack_concat || has[p].empty();
    for (const auto& [key, member] : keys) {
      if (!wants_all || has[p].contains(key) || absent.size() >= absent_max) continue;
      std::string name = fill_pattern(*rule.patterns[p], member->groups);
      absent.push_back(name.empty() ? "a match of " + rule.patterns[p]->pattern()
                                    : std::move(name));
      if (has[p].empty() && rule.rule.op != RuleOp::stack_concat) break;
    }
  }
  // Which numbers are left out by all patterns alike.
  std::set<unsigned> all;
  if (rule.rule.op == RuleOp::stack_concat) {
    for (const auto& some : numbers) all.insert(some.begin(), some.end());
  }
  for (std::size_t p = 0; p < rule.patterns.size(); ++p) {
    const auto& present = all.empty() ? numbers[p] : all;
    if (present.empty() || examples[p] == nullptr) continue;
    const auto group = counting_group(*examples[p], target);
    if (!group || absent.size() >= absent_max) continue;
    for (const unsigned number : gaps(present, expected)) {
      const std::string& example = catalog_.tensors()[examples[p]->source].name;
      absent.push_back(renumbered(example, examples[p]->groups[*group], number));
    }
  }
  return absent;
}

}  // namespace loadstone
