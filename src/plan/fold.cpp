#include "plan/fold.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "base/text.h"
#include "boxes/merges.h"
#include "loadstone/name_hash.h"
#include "plan/costs.h"

namespace loadstone {

namespace {

// A tensor name in which each number is replaced by a placeholder.
struct NumberedName {
  std::string text;  // placeholder '\1' for each number
  std::vector<std::string> numbers;
};

NumberedName numbered_name(std::string_view name) {
  NumberedName pattern;
  for (std::size_t i = 0; i < name.size();) {
    if (!is_digit(name[i])) {
      pattern.text += name[i++];
      continue;
    }
    const std::size_t begin = i;
    while (i < name.size() && is_digit(name[i])) ++i;
    pattern.text += '\1';
    pattern.numbers.emplace_back(name.substr(begin, i - begin));
  }
  return pattern;
}

// The numbers that appear at each placeholder of one pattern.
class Holes {
 public:
  void add(const std::vector<std::string>& numbers) {
    holes_.resize(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      holes_[i].texts.insert(numbers[i]);
      // Numbers with ten or more digits are unlikely to be indices.
      if (numbers[i].size() < 10) holes_[i].values.insert(std::stoull(numbers[i]));
    }
  }

  std::string fill(const std::string& pattern) const {
    std::string text;
    std::size_t hole = 0;
    for (const char character : pattern) {
      if (character != '\1' || hole >= holes_.size()) {
        text += character;
        continue;
      }
      const auto& [texts, values] = holes_[hole++];
      if (texts.size() == 1) {
        text += *texts.begin();
      } else {
        text += values.size() == texts.size() ? "{" + ranges_text(values, 4) + "}" : "{*}";
      }
    }
    return text;
  }

 private:
  struct Hole {
    std::set<std::string> texts;
    std::set<std::uint64_t> values;
  };
  std::vector<Hole> holes_;
};

struct Folded {
  PlanRow row;
  NumberedName name;
  NumberedName from;
  Holes names;
  Holes sources;
};

std::string dtype_text(const Plan& plan, const PlannedTarget& target) {
  std::set<std::string> others;
  for (const Box& box : target.recipe.boxes) {
    const Encoding encoding = plan.catalog->tensors()[box.source].encoding;
    if (box.decoding != no_decoding) {
      others.insert(fmt::format("{} by {}", encoding.name(), plan.decodings[box.decoding].kernel));
    } else if (encoding != Encoding(target.dtype)) {
      others.insert(std::string(encoding.name()));
    }
  }
  std::string text(name(target.dtype));
  if (!others.empty()) text = fmt::format("{} -> {}", fmt::join(others, ", "), text);
  if (target.quantization) text += " -> " + printable(target.quantization->encoding);
  return text;
}

std::string origin_text(const Plan& plan, const PlannedTarget& target) {
  const Recipe& recipe = target.recipe;
  std::string text(name(recipe.origin));
  if (recipe.origin == Origin::excluded) text += ": " + recipe.reason;
  if (recipe.boxes.size() > 1) text += fmt::format(", {} boxes", recipe.boxes.size());
  if (recipe.merge != nullptr) text += ", " + counted(recipe.merge->terms.size(), "term");
  if (target.delivery == Delivery::file_view) text += ", view of the file";
  if (target.delivery == Delivery::disk_keep) {
    text += is_whole_source(plan, target) ? ", kept in its shard"
                                          : ", kept in its shard and cast at each read";
  }
  return text;
}

std::string from_text(const Plan& plan, const PlannedTarget& target) {
  if (target.recipe.origin == Origin::tie) return target.recipe.tie_of;
  std::set<std::uint32_t> sources;
  for_each_box(target.recipe, [&](const Box& box) { sources.insert(box.source); });
  if (sources.empty()) return {};
  if (sources.size() > 1) return counted(sources.size(), "source");
  const std::string& source = plan.catalog->tensors()[*sources.begin()].name;
  return source == target.name ? std::string() : source;
}

}  // namespace

std::string ranges_text(const std::set<std::uint64_t>& numbers, std::size_t runs_max) {
  std::string text;
  std::size_t runs = 0;
  for (auto at = numbers.begin(); at != numbers.end();) {
    const std::uint64_t first = *at;
    std::uint64_t last = first;
    for (++at; at != numbers.end() && *at == last + 1; ++at) last = *at;
    if (++runs > runs_max) return text + ",...";
    text += fmt::format("{}{}", runs == 1 ? "" : ",", first);
    if (last > first) text += fmt::format("-{}", last);
  }
  return text;
}

PlanRow row_of(const Plan& plan, const PlannedTarget& target) {
  return {.name = target.name,
          .count = 1,
          .kind = std::string(name(target.kind)),
          .shape = target.shape.text(),
          .dtype = dtype_text(plan, target),
          .device = target.device,
          .origin = origin_text(plan, target),
          .from = from_text(plan, target),
          .bytes = target.recipe.origin == Origin::tie ? 0 : target.byte_count()};
}

std::vector<PlanRow> fold_targets(const Plan& plan) {
  std::vector<Folded> folded;
  std::unordered_map<std::string, std::size_t, NameHash, std::equal_to<>> index;
  for (const PlannedTarget& target : plan.targets) {
    PlanRow row = row_of(plan, target);
    const std::uint64_t bytes = row.bytes;
    row.bytes = 0;
    row.count = 0;
    NumberedName name = numbered_name(row.name);
    NumberedName from = numbered_name(row.from);
    const std::string key = fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}", name.text, row.kind,
                                        row.shape, row.dtype, row.device, row.origin, from.text);
    const auto [found, is_new] = index.emplace(key, folded.size());
    if (is_new) folded.push_back({std::move(row), name, from, {}, {}});
    Folded& into = folded[found->second];
    ++into.row.count;
    into.row.bytes += bytes;
    into.names.add(name.numbers);
    into.sources.add(from.numbers);
  }
  std::vector<PlanRow> rows;
  rows.reserve(folded.size());
  for (Folded& one : folded) {
    one.row.name = one.names.fill(one.name.text);
    one.row.from = one.sources.fill(one.from.text);
    rows.push_back(std::move(one.row));
  }
  return rows;
}

std::string counts_text(const Plan& plan) {
  std::map<Origin, std::size_t> counts;
  for (const PlannedTarget& target : plan.targets) ++counts[target.recipe.origin];
  std::string text = counted(plan.targets.size(), "target");
  const char* separator = ": ";
  for (const auto& [origin, count] : counts) {
    text += fmt::format("{}{} {}", separator, count, name(origin));
    separator = ", ";
  }
  return text;
}

}  // namespace loadstone
