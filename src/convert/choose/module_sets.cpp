#include "convert/choose/module_sets.h"

#include <algorithm>
#include <utility>

#include "base/natural_order.h"
#include "base/pattern.h"
#include "base/text.h"

namespace loadstone {

namespace {

struct TemplateHash {
  std::size_t operator()(const Template& elements) const noexcept {
    std::uint64_t hash = elements.size();
    for (const Element each : elements) hash = (hash ^ each) * 0x9E3779B97F4A7C15 + (hash >> 29);
    return static_cast<std::size_t>(hash);
  }
};

std::string alternatives(std::span<const std::string_view> texts) {
  const auto quoted = [](std::string_view text) { return re2::RE2::QuoteMeta(piece(text)); };
  if (texts.size() == 1) return quoted(texts.front());
  if (texts.size() == 2 && texts[0] == "layer" && texts[1] == "layers") return "layers?";
  std::string text = "(?:";
  for (const std::string_view each : texts) text += quoted(each) + '|';
  text.back() = ')';
  return text;
}

bool have_common(std::span<const std::string_view> first,
                 std::span<const std::string_view> second) {
  if (first.size() < second.size()) std::swap(first, second);
  return std::ranges::any_of(second, [&](std::string_view each) {
    return std::ranges::binary_search(first, each, natural_less);
  });
}

}  // namespace

std::string with_zeros(std::string_view name) {
  std::string text;
  for_each_component(name, [&](std::string_view component) {
    text.append(is_digits(component) ? "0" : component) += '.';
  });
  text.pop_back();
  return text;
}

ModuleSets::ModuleSets() : sets_(first_set), layer_(single("layer")) {}

Template ModuleSets::template_of(std::string_view name) {
  Template elements;
  for_each_component(name, [&](std::string_view text) {
    const Element element = single(text);
    // transformers renames `layer.0` to `layers.0` in some models.
    const bool renames = is_number(element) && !elements.empty() && elements.back() == layer_;
    if (renames) elements.back() = joined({layer_, single("layers")});
    elements.push_back(element);
  });
  return elements;
}

Element ModuleSets::single(std::string_view text) {
  const auto [known, is_new] = singles_.try_emplace(text, static_cast<Element>(sets_.size()));
  if (is_new) {
    const bool is_ascii = std::ranges::all_of(text, [](char each) { return (each & 0x80) == 0; });
    sets_.push_back({{text}, is_digits(text), is_digits(text) || !is_ascii});
  }
  return known->second;
}

Element ModuleSets::joined(const std::vector<Element>& elements) {
  if (elements.size() == 1) return elements.front();
  Set set;
  for (const Element each : elements) {
    const Set& part = sets_[each];
    set.texts.insert(set.texts.end(), part.texts.begin(), part.texts.end());
    set.is_number = part.is_number;
    set.may_be_number |= part.may_be_number;
  }
  std::ranges::sort(set.texts, natural_less);
  const auto repeated = std::ranges::unique(set.texts);
  set.texts.erase(repeated.begin(), repeated.end());
  if (set.texts.size() == 1) return single(set.texts.front());
  const auto [known, is_new] = joined_.try_emplace(set.texts, static_cast<Element>(sets_.size()));
  if (is_new) sets_.push_back(std::move(set));
  return known->second;
}

bool ModuleSets::meet(std::span<const Element> pattern, std::span<const Element> name) const {
  bool has_gap = false;
  while (true) {
    const auto end = std::ranges::find(pattern, gap);
    const std::span<const Element> part(pattern.begin(), end);
    if (part.size() > name.size()) return false;
    if (end == pattern.end()) {
      if (!has_gap && part.size() < name.size()) return false;
      return fit(part, name.last(part.size()));
    }
    // The first place is the best one, because it leaves most components for the rest.
    while (!fit(part, name.first(part.size()))) {
      if (!has_gap || name.size() == part.size()) return false;
      name = name.subspan(1);
    }
    name = name.subspan(part.size());
    pattern = std::span(end + 1, pattern.end());
    has_gap = true;
  }
}

bool ModuleSets::fit(std::span<const Element> part, std::span<const Element> name) const {
  for (std::size_t i = 0; i < part.size(); ++i) {  // fails early at most names
    const bool are_single =
        part[i] >= first_set && texts(part[i]).size() == 1 && texts(name[i]).size() == 1;
    if (are_single && part[i] != name[i]) return false;
  }
  for (std::size_t i = 0; i < part.size(); ++i) {
    if (part[i] == name[i] || part[i] == any_component) continue;
    const bool is_common = part[i] == any_number ? sets_[name[i]].may_be_number
                                                 : have_common(texts(part[i]), texts(name[i]));
    if (!is_common) return false;
  }
  return true;
}

bool ModuleSets::may_join(Element first, Element second) const {
  if (first == gap || second == gap || second == any_component) return false;
  const auto ends = [&](std::string_view text) {
    if (first == any_number || is_number(first)) return is_digit(text.back());
    return std::ranges::any_of(texts(first), [&](auto each) { return text.ends_with(each); });
  };
  const auto begins = [&](std::string_view text) {
    if (second == any_number || is_number(second)) return !text.empty() && is_digit(text.front());
    return std::ranges::any_of(texts(second), [&](auto each) { return text.starts_with(each); });
  };
  return std::ranges::any_of(singles_, [&](const auto& single) {
    const std::string_view text = single.first;
    if (std::ranges::any_of(text, [](char each) { return (each & 0x80) != 0; })) return true;
    for (std::size_t i = 1; i < text.size(); ++i) {
      if (ends(text.substr(0, i)) && begins(text.substr(i + 1))) return true;
    }
    return false;
  });
}

std::string ModuleSets::expression(const Template& elements) const {
  bool are_escaped = false;
  for (std::size_t i = 1; i < elements.size() && !are_escaped; ++i) {
    are_escaped = may_join(elements[i - 1], elements[i]);
  }
  std::string text;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const bool is_last = i + 1 == elements.size();
    if (elements[i] == gap) {
      if (!is_last) text += R"((.*\.)?)";
      continue;
    }
    if (elements[i] == any_component) return text + ".*";
    text += elements[i] == any_number ? R"(\d+)" : alternatives(texts(elements[i]));
    if (!is_last) text += are_escaped || elements[i + 1] == any_component ? R"(\.)" : ".";
  }
  return text + "$";
}

void ModuleSets::merge(std::vector<Template>& templates, bool numbers_only) {
  std::size_t most = 0;
  for (const Template& each : templates) most = std::max(most, each.size());
  for (std::size_t from_end = 1; from_end <= most; ++from_end) {
    std::unordered_map<Template, std::vector<Element>, TemplateHash> groups;
    std::vector<Template> merged;
    for (Template& each : templates) {
      Element* const element = each.size() < from_end ? nullptr : &each[each.size() - from_end];
      const bool is_joined =
          element != nullptr && *element >= first_set && (!numbers_only || is_number(*element));
      if (!is_joined) {
        merged.push_back(std::move(each));
        continue;
      }
      const Element hole = is_number(*element) ? any_number : any_component;
      const Element value = std::exchange(*element, hole);
      groups[std::move(each)].push_back(value);
    }
    while (!groups.empty()) {
      auto group = groups.extract(groups.begin());
      group.key()[group.key().size() - from_end] = joined(group.mapped());
      merged.push_back(std::move(group.key()));
    }
    templates = std::move(merged);
  }
  std::ranges::sort(templates);
  const auto repeated = std::ranges::unique(templates);
  templates.erase(repeated.begin(), repeated.end());
}

}  // namespace loadstone
