#include "plan/nearest.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "base/json_writer.h"
#include "base/text.h"
#include "base/unknown_word.h"
#include "plan/rules.h"

namespace loadstone {

namespace {

constexpr std::size_t names_per_ending_max = 8;
// Limit on the endings that are stored per name, because a name of 1 MB that consists of dots has a
// million endings of up to 1 MB each.
constexpr std::size_t endings_max = 64;
constexpr std::uint64_t comparisons_max = 100'000;

std::uint64_t hash_of(const Shape& shape) {
  std::uint64_t hash = shape.rank();
  for (const std::uint64_t extent : shape.extents()) {
    hash = (hash ^ extent) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

// Returns the offset of the longest ending to store.
std::size_t first_ending(std::string_view name) {
  std::size_t begin = name.size();
  for (std::size_t i = 0; i < endings_max; ++i) {
    if (begin == 0) return 0;
    const auto dot = name.rfind('.', begin - 1);
    if (dot == std::string_view::npos) return 0;
    begin = dot;
  }
  return begin + 1;
}

constexpr std::size_t template_groups_max = 9;  // a template refers to groups as $1 to $9

// Splits the name into alternating runs of digits and non-digits.
std::vector<std::string_view> runs_of(std::string_view name) {
  std::vector<std::string_view> runs;
  while (!name.empty()) {
    const bool is_number = is_digit(name.front());
    std::size_t end = 1;
    while (end < name.size() && is_digit(name[end]) == is_number) ++end;
    runs.push_back(name.substr(0, end));
    name.remove_prefix(end);
  }
  return runs;
}

std::vector<std::string_view> numbers_of(const std::vector<std::string_view>& runs) {
  std::vector<std::string_view> numbers;
  for (const std::string_view run : runs) {
    if (is_digits(run)) numbers.push_back(run);
  }
  return numbers;
}

std::string without_numbers(std::string_view name) {
  std::string text;
  for (const std::string_view run : runs_of(name)) text += is_digits(run) ? "#" : run;
  return text;
}

std::string pattern_of(std::string_view text) {
  std::string pattern;
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (byte < 0x80 && std::ispunct(byte) != 0 && character != '_') pattern += '\\';
    pattern += character;
  }
  return pattern;
}

}  // namespace

void NearestNames::add(std::string_view name, const Shape* shape) {
  const auto index = static_cast<std::uint32_t>(names_.size());
  names_.push_back({name, shape});
  if (shape != nullptr) shapes_[hash_of(*shape)].push_back(index);
  for (std::size_t begin = first_ending(name);;) {
    auto& found = endings_[name.substr(begin)];
    if (found.size() < names_per_ending_max) found.push_back(index);
    const auto dot = name.find('.', begin);
    if (dot == std::string_view::npos) break;
    begin = dot + 1;
  }
}

void NearestNames::collect_by_ending(std::string_view name, std::vector<std::size_t>& found) const {
  for (std::size_t begin = first_ending(name);;) {
    const auto dot = name.find('.', begin);
    // The last word alone ("weight") is too common to identify a name, unless one of the two names
    // consists of that word only.
    const bool is_last = dot == std::string_view::npos;
    if (const auto entry = endings_.find(name.substr(begin)); entry != endings_.end()) {
      for (const std::uint32_t index : entry->second) {
        if (!is_last || begin == 0 || names_[index].name.size() == name.size() - begin) {
          found.push_back(index);
        }
      }
      if (!found.empty()) return;
    }
    if (is_last) return;
    begin = dot + 1;
  }
}

std::size_t NearestNames::collect_by_edits(std::string_view name, const Shape& shape,
                                           std::vector<std::size_t>& found) {
  const auto same_shape = shapes_.find(hash_of(shape));
  if (same_shape == shapes_.end()) return 0;
  const auto distance_max = static_cast<unsigned>(std::min<std::size_t>(name.size() / 4 + 1, 12));
  std::vector<std::pair<unsigned, std::uint32_t>> near;
  for (const std::uint32_t index : same_shape->second) {
    if (++comparisons_ > comparisons_max) break;
    if (const auto distance = edit_distance(name, names_[index].name, distance_max)) {
      near.emplace_back(*distance, index);
    }
  }
  std::ranges::stable_sort(near, {}, &std::pair<unsigned, std::uint32_t>::first);
  for (const auto& [distance, index] : near) found.push_back(index);
  const auto is_farther = [&](const auto& each) { return each.first > near.front().first; };
  return static_cast<std::size_t>(std::ranges::find_if(near, is_farther) - near.begin());
}

// Returns true if exactly one of the names has the numbers of `name`, and all others differ from it
// only in their numbers.
bool NearestNames::put_same_numbers_first(std::string_view name,
                                          std::span<std::size_t> equals) const {
  const std::string pattern = without_numbers(names_[equals.front()].name);
  const auto numbers = numbers_of(runs_of(name));
  const auto others = std::ranges::stable_partition(
      equals, [&](std::size_t i) { return numbers_of(runs_of(names_[i].name)) == numbers; });
  return equals.size() == others.size() + 1 && std::ranges::all_of(equals, [&](std::size_t i) {
           return without_numbers(names_[i].name) == pattern;
         });
}

Nearest NearestNames::nearest(std::string_view name, const Shape& shape, std::size_t count_max) {
  std::vector<std::size_t> found;
  std::size_t edited_equals = 0;
  collect_by_ending(name, found);
  const auto has_shape = [&](std::size_t i) {
    return names_[i].shape != nullptr && *names_[i].shape == shape;
  };
  if (std::ranges::none_of(found, has_shape)) {
    std::vector<std::size_t> edited;
    edited_equals = collect_by_edits(name, shape, edited);
    found.insert(found.begin(), edited.begin(), edited.end());
  }
  std::vector<std::size_t> unique;
  for (const std::size_t index : found) {
    if (std::ranges::find(unique, index) == unique.end()) unique.push_back(index);
    if (unique.size() == 64) break;
  }
  if (unique.empty()) return {};
  const auto shaped = std::stable_partition(unique.begin(), unique.end(), has_shape);
  std::size_t equals = edited_equals;
  if (equals == 0) equals = static_cast<std::size_t>(shaped - unique.begin());
  if (equals == 0) equals = unique.size();
  equals = std::min(equals, unique.size());
  const bool is_single =
      equals == 1 || put_same_numbers_first(name, std::span(unique).first(equals));
  const bool may_fit = has_shape(unique.front()) || names_[unique.front()].shape == nullptr;
  if (unique.size() > count_max) unique.resize(count_max);
  return {std::move(unique), is_single && may_fit};
}

std::string suggested_rule(std::string_view source, std::string_view target) {
  const auto source_runs = runs_of(source);
  const auto target_runs = runs_of(target);
  const auto numbers = numbers_of(source_runs);
  const bool is_general =
      numbers == numbers_of(target_runs) && numbers.size() <= template_groups_max;
  std::string pattern;
  for (const std::string_view run : source_runs) {
    pattern += is_general && is_digits(run) ? "(\\d+)" : pattern_of(run);
  }
  std::string made;
  std::size_t group = 0;
  for (const std::string_view run : target_runs) {
    made += is_general && is_digits(run) ? "$" + std::to_string(++group) : Template::quoted(run);
  }
  JsonWriter json;
  json.begin_object();
  json.member("op", "rename");
  json.member("sources", std::vector<std::string>{pattern});
  json.member("targets", std::vector<std::string>{made});
  json.end_object();
  return json.take();
}

}  // namespace loadstone
