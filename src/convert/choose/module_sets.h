// Sets of module names as templates, which have one element per component of the names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace loadstone {

template <typename Visit>
void for_each_component(std::string_view name, const Visit& visit) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    visit(name.substr(begin, end - begin));
    begin = end + 1;
  }
}

// Returns the name with 0 for each component of digits.
[[nodiscard]] std::string with_zeros(std::string_view name);

// Elements from `first_set` on are sets of texts; the template of a single name has sets of one
// text.
using Element = std::uint32_t;
using Template = std::vector<Element>;
inline constexpr Element any_number = 0;
inline constexpr Element any_component = 1;
inline constexpr Element gap = 2;  // any components, or none
inline constexpr Element first_set = 3;

// The sets of texts in templates. The texts belong to the caller's names.
class ModuleSets {
 public:
  ModuleSets();

  [[nodiscard]] Template template_of(std::string_view name);
  [[nodiscard]] Element single(std::string_view text);
  [[nodiscard]] Element joined(const std::vector<Element>& elements);

  [[nodiscard]] std::span<const std::string_view> texts(Element element) const {
    return sets_[element].texts;
  }
  // Returns true for a set of numbers.
  [[nodiscard]] bool is_number(Element element) const { return sets_[element].is_number; }

  // Returns true if a name matches both templates. `name` contains sets only.
  [[nodiscard]] bool meet(std::span<const Element> pattern, std::span<const Element> name) const;

  // Returns the template as an expression of Python's re and of RE2, for the whole name. Its dots
  // are not escaped unless they could match other characters of these names: vLLM renames parts of
  // modules, such as ".self_attn.", in the text of expressions too.
  [[nodiscard]] std::string expression(const Template& elements) const;

  // Joins templates that differ in one element only, which does not change the names that they
  // match, and sorts them.
  void merge(std::vector<Template>& templates, bool numbers_only);

 private:
  struct Set {
    std::vector<std::string_view> texts;  // sorted
    bool is_number = false;
    bool may_be_number = false;  // Python's \d matches digits of all alphabets
  };

  // Returns true if a component of a name contains both elements with one character in between.
  [[nodiscard]] bool may_join(Element first, Element second) const;
  [[nodiscard]] bool fit(std::span<const Element> part, std::span<const Element> name) const;

  std::vector<Set> sets_;
  std::unordered_map<std::string_view, Element> singles_;
  std::map<std::vector<std::string_view>, Element> joined_;
  Element layer_;
};

}  // namespace loadstone
