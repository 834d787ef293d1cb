#include "convert/module_patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/pattern.h"
#include "base/text.h"
#include "convert/quantize_rules.h"

namespace loadstone {

namespace {

// Names without a part that is a number: modules outside the blocks of layers.
constexpr std::string_view outside_blocks = R"(\d*[^.\d][^.]*(\.\d*[^.\d][^.]*)*$)";

constexpr std::size_t pattern_bytes_max = 4000;

// Heads of encoders, whose weights are tied to an embedding and in no file.
constexpr const char* tied_heads = R"((.*\.)?(lm_head|predictions|cls|head)\.decoder$)";

Pattern compile(std::string_view text) {
  return compile_pattern(text, "plan.options", "rules", pattern_memory(1));
}

bool matches_any(const std::string& pattern, const std::vector<std::string>& modules) {
  const Pattern compiled = compile("^(?:" + pattern + ")");
  return std::ranges::any_of(modules,
                             [&](std::string_view each) { return is_in(*compiled, each); });
}

// The name from its first block of layers on, or all of it.
std::string_view from_layers(std::string_view module) {
  static const Pattern layers = compile(layer_pattern);
  re2::StringPiece found;
  if (!layers->Match(piece(module), 0, module.size(), re2::RE2::UNANCHORED, &found, 1)) {
    return module;
  }
  const auto begin = static_cast<std::size_t>(found.data() - module.data());
  return module.substr(module[begin] == '.' ? begin + 1 : begin);
}

// The text as an expression that matches it; on request its numbers match all numbers.
std::string escaped(std::string_view module, bool any_number) {
  std::string pattern;
  for (std::size_t begin = 0; begin <= module.size();) {
    const std::size_t end = std::min(module.find('.', begin), module.size());
    const std::string_view part = module.substr(begin, end - begin);
    if (begin > 0) pattern += R"(\.)";
    pattern += any_number && is_digits(part) ? R"(\d+)" : re2::RE2::QuoteMeta(piece(part));
    begin = end + 1;
  }
  return pattern;
}

// Adds patterns for modules, each the shortest that matches none of the others.
class Patterns {
 public:
  explicit Patterns(const std::vector<std::string>& others) : others_(others) {
    for (std::string_view name : others) {
      endings_.insert(name);
      for (auto dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
        name.remove_prefix(dot + 1);
        endings_.insert(name);
      }
    }
  }

  // Returns true if one of them is in the module under any prefix.
  [[nodiscard]] bool is_inside(std::string_view module) const {
    const std::string beginning = fmt::format("{}.", from_layers(module));
    const auto found = endings_.lower_bound(beginning);
    return found != endings_.end() && found->starts_with(beginning);
  }

  void add(std::string_view module) {
    const std::string_view name = from_layers(module);
    if (push_if_free(fmt::format(R"((.*\.)?{}$)", escaped(name, true)))) return;
    const std::size_t dot = name.find('.');
    const std::size_t second = name.find('.', dot + 1);
    if (second == std::string_view::npos || !is_digits(name.substr(dot + 1, second - dot - 1))) {
      return add_single(module);
    }
    Group& group =
        groups_[{std::string(name.substr(0, dot)), escaped(name.substr(second + 1), true)}];
    group.layers.emplace(name.substr(dot + 1, second - dot - 1));
    group.modules.push_back(module);
  }

  // All that were added: layers with the same modules in one pattern where that is free.
  [[nodiscard]] std::vector<std::string> take() {
    for (const auto& [key, group] : groups_) {
      const auto& [block, rest] = key;
      const std::string numbers = fmt::format("{}", fmt::join(group.layers, "|"));
      const std::string layers = group.layers.size() == 1 ? numbers : "(?:" + numbers + ")";
      if (push_if_free(fmt::format(R"((.*\.)?{}\.{}\.{}$)", block, layers, rest))) {
        continue;
      }
      for (const std::string_view module : group.modules) add_single(module);
    }
    return std::move(patterns_);
  }

 private:
  struct Group {
    std::set<std::string> layers;
    std::vector<std::string_view> modules;
  };

  void add_single(std::string_view module) {
    const std::string_view name = from_layers(module);
    if (!endings_.contains(name)) {
      push(fmt::format(R"((.*\.)?{}$)", escaped(name, false)));
      return;
    }
    // Adds one of the parts before it, in whatever order the library has them.
    std::string_view before = module.substr(0, module.size() - name.size());
    while (!before.empty()) {
      const std::string_view part = before.substr(0, before.find('.'));
      before.remove_prefix(std::min(part.size() + 1, before.size()));
      if (part.empty() || part == "model") continue;
      if (push_if_free(
              fmt::format(R"((.*\.)?{}\.(.*\.)?{}$)", escaped(part, true), escaped(name, true)))) {
        return;
      }
    }
  }

  // Names that are too long for a pattern are in the lists as they are.
  void push(std::string pattern) {
    if (pattern.size() > pattern_bytes_max || !added_.insert(pattern).second) return;
    patterns_.push_back(std::move(pattern));
  }

  bool push_if_free(std::string pattern) {
    if (pattern.size() > pattern_bytes_max) return false;
    const auto [known, is_new] = is_free_.try_emplace(pattern);
    if (is_new) known->second = !matches_any(pattern, others_);
    const bool is_free = known->second;
    if (is_free) push(std::move(pattern));
    return is_free;
  }

  const std::vector<std::string>& others_;
  std::set<std::string_view> endings_;   // of their names, from each dot on
  std::map<std::string, bool> is_free_;  // whether a pattern matches none of them
  std::map<std::pair<std::string, std::string>, Group> groups_;  // by block and rest of the name
  std::set<std::string> added_;
  std::vector<std::string> patterns_;
};

}  // namespace

std::vector<std::string> patterns_of_plain(const std::vector<std::string>& plain,
                                           const std::vector<std::string>& quantized) {
  std::vector<std::string> left = plain;
  std::vector<std::string> patterns;
  const auto add = [&](const std::string& pattern) {
    if (!matches_any(pattern, left) || matches_any(pattern, quantized)) return;
    const Pattern compiled = compile("^(?:" + pattern + ")");
    std::erase_if(left, [&](const std::string& each) { return is_in(*compiled, each); });
    patterns.push_back(pattern);
  };
  Patterns single(quantized);
  if (matches_any(std::string(outside_blocks), quantized)) {
    // Rules are about blocks: they could match what is quantized under another name.
    const Pattern outside = compile(fmt::format("^(?:{})", outside_blocks));
    const auto is_outside = [&](const std::string& each) { return is_in(*outside, each); };
    for (const std::string& each : plain) {
      if (is_outside(each)) single.add(each);
    }
    std::erase_if(left, is_outside);
    if (!matches_any(tied_heads, quantized)) patterns.emplace_back(tied_heads);
  }
  add(std::string(outside_blocks));
  for (const PlainRule& rule : plain_rules()) {
    if (rule.is_linear) add(fmt::format(".*(?:{})", rule.pattern));
  }
  for (const std::string& module : left) single.add(module);
  for (std::string& pattern : single.take()) patterns.push_back(std::move(pattern));
  return patterns;
}

std::vector<std::string> patterns_of_stacks(const std::vector<std::string>& stacks,
                                            const std::vector<std::string>& quantized) {
  std::vector<std::string> patterns;
  const Patterns known(quantized);
  for (const std::string_view stack : stacks) {
    patterns.push_back(known.is_inside(stack)
                           ? fmt::format(R"({}\..*)", escaped(stack, false))
                           : fmt::format(R"((.*\.)?{}\..*)", escaped(from_layers(stack), false)));
  }
  return patterns;
}

std::vector<std::string> patterns_of_layers(const std::vector<std::string>& modules,
                                            const std::vector<std::string>& others) {
  Patterns single(others);
  for (const std::string& module : modules) single.add(module);
  return single.take();
}

}  // namespace loadstone
