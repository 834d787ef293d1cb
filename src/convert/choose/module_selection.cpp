#include "convert/choose/module_selection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/pattern.h"
#include "convert/choose/module_sets.h"
#include "convert/choose/quantize_rules.h"

namespace loadstone {

namespace {

constexpr std::size_t pattern_bytes_max = 4000;
// Patterns match no longer names, and only names of printable ASCII characters.
constexpr std::size_t components_max = 64;
// Maximum number of comparisons between the templates of the selected names and of the others.
constexpr std::size_t comparisons_max = 4'000'000;

// Returns the part of the name that begins at its first block of layers, or else at its first
// numbered list, or the whole name.
std::string_view from_layers(std::string_view module) {
  static const auto compile = [](std::string_view text) {
    return compile_pattern(text, "plan.options", "rules", pattern_memory(1));
  };
  static const Pattern layers = compile(layer_pattern);
  static const Pattern list = compile(R"((^|\.)\d*[^.\d][^.]*\.\d+\.)");
  for (const Pattern* const each : {&layers, &list}) {
    re2::StringPiece found;
    if (!(*each)->Match(piece(module), 0, module.size(), re2::RE2::UNANCHORED, &found, 1)) continue;
    const auto begin = static_cast<std::size_t>(found.data() - module.data());
    return module.substr(module[begin] == '.' ? begin + 1 : begin);
  }
  return module;
}

bool may_match(std::string_view name) {
  return std::ranges::all_of(name, [](char each) { return each >= ' ' && each <= '~'; }) &&
         std::ranges::count(name, '.') < static_cast<std::ptrdiff_t>(components_max);
}

class Selector {
 public:
  Selector(const std::vector<std::string>& names, const std::vector<std::string>& others)
      : all_names_(names) {
    for (const std::string& name : names) {
      names_.push_back(may_match(name) ? sets_.template_of(name) : Template());
    }
    for (std::string_view other : others) {
      if (other.ends_with('\n')) other.remove_suffix(1);  // Python's $ matches before it
      others_.push_back(sets_.template_of(other));
    }
    merged_others_ = others_;
    sets_.merge(merged_others_, false);
    for (const Template& each : names_) {
      if (!each.empty()) rows_.push_back(each);
    }
    sets_.merge(rows_, true);
    if (rows_.size() * merged_others_.size() > comparisons_max) rows_.clear();
  }
  Selector(const Selector&) = delete;
  Selector& operator=(const Selector&) = delete;

  [[nodiscard]] Selection select() {
    for (const Template& each : rows_) add(each);
    return checked();
  }

  [[nodiscard]] std::vector<std::string> select_inside() {
    for (const Template& each : rows_) {
      const std::span<const Element> row(each);
      Template pattern = {gap};
      append(pattern, row.subspan(layers_at(each)));
      append(pattern, inside);
      if (!is_free(pattern)) {
        pattern = each;
        append(pattern, inside);
      }
      patterns_.push_back(std::move(pattern));
    }
    sets_.merge(patterns_, false);
    return texts();
  }

 private:
  static constexpr Element inside[] = {any_component, gap};

  static void append(Template& elements, std::span<const Element> more) {
    elements.insert(elements.end(), more.begin(), more.end());
  }

  // Returns the index of the first component that is part of a list of layers.
  [[nodiscard]] std::size_t layers_at(const Template& row) const {
    std::string name;
    for (const Element each : row) name.append(sets_.texts(each).front()) += '.';
    name.pop_back();
    const std::size_t before = name.size() - from_layers(name).size();
    return static_cast<std::size_t>(std::ranges::count(name.substr(0, before), '.'));
  }

  [[nodiscard]] bool is_free(const Template& pattern) const {
    return std::ranges::none_of(merged_others_,
                                [&](const Template& each) { return sets_.meet(pattern, each); });
  }

  // Replaces sets of numbers by any number where no other name matches then.
  [[nodiscard]] Template widened(Template pattern) const {
    const auto is_numbers = [&](Element each) {
      return each >= first_set && sets_.is_number(each);
    };
    Template widest = pattern;
    std::ranges::replace_if(widest, is_numbers, any_number);
    if (is_free(widest)) return widest;
    for (std::size_t i = pattern.size(); i-- > 0;) {
      if (!is_numbers(pattern[i])) continue;
      const Element numbers = std::exchange(pattern[i], any_number);
      if (!is_free(pattern)) pattern[i] = numbers;
    }
    return pattern;
  }

  bool push_if_free(const Template& pattern) {
    if (!is_free(pattern)) return false;
    patterns_.push_back(widened(pattern));
    return true;
  }

  // Splits the components before the layers into parts, each with the number after it. Omits
  // `model`, which libraries add and drop.
  [[nodiscard]] std::vector<Template> parts_of(std::span<const Element> before) {
    std::vector<Template> parts;
    bool is_kept = false;
    for (const Element each : before) {
      if (sets_.is_number(each)) {
        if (is_kept) parts.back().push_back(each);
        continue;
      }
      is_kept = each != sets_.single("model") && each != sets_.single("");
      if (is_kept) parts.push_back({each});
    }
    return parts;
  }

  // Adds a pattern for the row: for any prefix, else for prefixes with one or all of the parts of
  // this prefix, else for many names with exactly this prefix.
  void add(const Template& row) {
    const std::size_t at = layers_at(row);
    const std::span<const Element> layers = std::span(row).subspan(at);
    Template pattern = {gap};
    append(pattern, layers);
    if (push_if_free(pattern)) return;
    Template all;
    for (const Template& part : parts_of(std::span(row).first(at))) {
      all.push_back(gap);
      append(all, part);
      pattern = {gap};
      append(pattern, part);
      pattern.push_back(gap);
      append(pattern, layers);
      if (push_if_free(pattern)) return;
    }
    if (!all.empty()) {
      all.push_back(gap);
      append(all, layers);
      if (push_if_free(all)) return;
    }
    std::size_t names = 1;
    for (const Element each : row) names *= sets_.texts(each).size();
    if (names > listed_names_max) push_if_free(row);
  }

  // Splits sets whose expressions are too long.
  void shorten() {
    for (std::size_t i = 0; i < patterns_.size();) {
      Template& pattern = patterns_[i];
      const auto size = [&](Element each) { return sets_.texts(each).size(); };
      if (sets_.expression(pattern).size() <= pattern_bytes_max) {
        ++i;
        continue;
      }
      Element& longest = *std::ranges::max_element(pattern, {}, size);
      const auto texts = sets_.texts(longest);
      if (texts.size() < 2) {
        patterns_.erase(patterns_.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      std::vector<Element> halves[2];
      for (std::size_t k = 0; k < texts.size(); ++k) {
        halves[k < texts.size() / 2 ? 0 : 1].push_back(sets_.single(texts[k]));
      }
      longest = sets_.joined(halves[0]);
      Template rest = pattern;
      rest[static_cast<std::size_t>(&longest - pattern.data())] = sets_.joined(halves[1]);
      patterns_.push_back(std::move(rest));
    }
  }

  [[nodiscard]] std::vector<std::string> texts() const {
    std::vector<std::string> texts;
    for (const Template& each : patterns_) texts.push_back(sets_.expression(each));
    std::ranges::sort(texts);
    return texts;
  }

  // Visits the patterns that match the name, until `visit` returns true.
  template <typename Visit>
  bool any_match(const Template& name, const Visit& visit) const {
    if (name.empty()) return false;
    for (const Element last : {name.back(), any_number}) {
      const auto found = by_last_.find(last);
      if (found == by_last_.end()) continue;
      for (const std::size_t each : found->second) {
        if (sets_.meet(patterns_[each], name) && visit(each)) return true;
      }
    }
    return false;
  }

  void index_patterns() {
    by_last_.clear();
    for (std::size_t i = 0; i < patterns_.size(); ++i) {
      const Element last = patterns_[i].back();
      if (last < first_set) by_last_[any_number].push_back(i);
      for (const std::string_view text : sets_.texts(last)) {
        by_last_[sets_.single(text)].push_back(i);
      }
    }
  }

  // Compares the patterns with each name: drops patterns that match other names, and lists the
  // names that no pattern matches.
  [[nodiscard]] Selection checked() {
    sets_.merge(patterns_, false);
    shorten();
    index_patterns();
    std::set<std::size_t> wrong;
    for (const Template& other : others_) {
      any_match(other, [&](std::size_t each) {
        wrong.insert(each);
        return false;
      });
    }
    for (auto each = wrong.rbegin(); each != wrong.rend(); ++each) {
      patterns_.erase(patterns_.begin() + static_cast<std::ptrdiff_t>(*each));
    }
    index_patterns();
    Selection selection;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      if (!any_match(names_[i], [](std::size_t) { return true; })) {
        selection.unmatched.push_back(all_names_[i]);
      }
    }
    selection.patterns = texts();
    return selection;
  }

  const std::vector<std::string>& all_names_;
  ModuleSets sets_;
  std::vector<Template> names_;  // empty for names that patterns cannot match
  std::vector<Template> others_;
  std::vector<Template> merged_others_;
  std::vector<Template> rows_;  // the names, with sets of numbers
  std::vector<Template> patterns_;
  std::unordered_map<Element, std::vector<std::size_t>> by_last_;
};

}  // namespace

std::vector<std::string> Selection::entries(const std::vector<std::string>& names) const {
  std::vector<std::string> entries = names.size() <= listed_names_max ? names : unmatched;
  for (std::string& name : entries) {
    // compressed-tensors would read these names as patterns, or as names of classes.
    const bool may_be_class = name.find('.') == name.npos && !name.empty() &&
                              std::isupper(static_cast<unsigned char>(name.front())) != 0;
    if (may_be_class || name.starts_with("re:")) {
      name = fmt::format("re:{}$", re2::RE2::QuoteMeta(piece(name)));
    }
  }
  for (const std::string& pattern : patterns) entries.push_back("re:" + pattern);
  return entries;
}

Selection select_modules(const std::vector<std::string>& names,
                         const std::vector<std::string>& others) {
  return Selector(names, others).select();
}

std::vector<std::string> patterns_inside(const std::vector<std::string>& modules,
                                         const std::vector<std::string>& others) {
  return Selector(modules, others).select_inside();
}

}  // namespace loadstone
