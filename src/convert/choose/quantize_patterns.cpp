#include "convert/choose/quantize_patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/pattern.h"
#include "base/text.h"
#include "convert/choose/quantize_rules.h"

namespace loadstone {

namespace {

// Matches names without a numeric component, which are modules outside of the blocks of layers.
constexpr std::string_view outside_blocks = R"(\d*[^.\d][^.]*(\.\d*[^.\d][^.]*)*$)";

constexpr std::size_t pattern_bytes_max = 4000;

// Matches heads of encoders, which no file contains because their weights are tied to an embedding.
constexpr const char* tied_heads = R"((.*\.)?(lm_head|predictions|cls|head)\.decoder$)";

Pattern compile_module_pattern(std::string_view text) {
  return compile_pattern(text, "plan.options", "rules", pattern_memory(1));
}

bool matches_any(const std::string& pattern, const std::vector<std::string>& modules) {
  const Pattern compiled = compile_module_pattern("^(?:" + pattern + ")");
  return std::ranges::any_of(modules,
                             [&](std::string_view each) { return is_in(*compiled, each); });
}

// Returns the part of the name that begins at its first block of layers, or else at its first
// numbered list, or the whole name.
std::string_view from_layers(std::string_view module) {
  static const Pattern layers = compile_module_pattern(layer_pattern);
  static const Pattern list = compile_module_pattern(R"((^|\.)\d*[^.\d][^.]*\.\d+\.)");
  for (const Pattern* const each : {&layers, &list}) {
    re2::StringPiece found;
    if (!(*each)->Match(piece(module), 0, module.size(), re2::RE2::UNANCHORED, &found, 1)) continue;
    const auto begin = static_cast<std::size_t>(found.data() - module.data());
    return module.substr(module[begin] == '.' ? begin + 1 : begin);
  }
  return module;
}

// Replaces `layer.0` by `layers.0`, because transformers renames it in some models.
std::string with_layers(std::string_view module) {
  static const Pattern layer = compile_module_pattern(R"((^|\.)layer\.(\d))");
  std::string name(module);
  re2::RE2::GlobalReplace(&name, *layer, R"(\1layers.\2)");
  return name;
}

// Returns an expression that matches the name, and `layers.0` for `layer.0`. With `any_number`,
// each number in the name matches any number.
std::string escaped(std::string_view module, bool any_number) {
  std::string pattern;
  bool is_layer = false;
  for (std::size_t begin = 0; begin <= module.size();) {
    const std::size_t end = std::min(module.find('.', begin), module.size());
    const std::string_view part = module.substr(begin, end - begin);
    const bool is_number = is_digits(part);
    if (is_layer && is_number) pattern += "s?";
    if (begin > 0) pattern += R"(\.)";
    pattern += any_number && is_number ? R"(\d+)" : re2::RE2::QuoteMeta(piece(part));
    is_layer = part == "layer";
    begin = end + 1;
  }
  return pattern;
}

// Splits a name's prefix into components, each with the number after it. Omits `model`, which
// libraries add and drop.
std::vector<std::string_view> parts_of(std::string_view before) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin < before.size();) {
    const std::size_t end = std::min(before.find('.', begin), before.size());
    const std::string_view part = before.substr(begin, end - begin);
    if (is_digits(part)) {
      if (!parts.empty() && parts.back().data() + parts.back().size() + 1 == part.data()) {
        parts.back() = {parts.back().data(), part.data() + part.size()};
      }
    } else if (!part.empty() && part != "model") {
      parts.push_back(part);
    }
    begin = end + 1;
  }
  return parts;
}

// Collects patterns for modules. Each is the shortest that matches no other module.
class Patterns {
 public:
  explicit Patterns(const std::vector<std::string>& others) : others_(others) {
    for (const std::string& name : others) {
      if (std::string renamed = with_layers(name); renamed != name) {
        others_.push_back(std::move(renamed));
      }
    }
    for (std::string_view name : others_) {
      endings_.insert(name);
      for (auto dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
        name.remove_prefix(dot + 1);
        endings_.insert(name);
      }
    }
  }
  Patterns(const Patterns&) = delete;
  Patterns& operator=(const Patterns&) = delete;

  // Returns true if another module's name begins with this module, under any prefix.
  [[nodiscard]] bool is_inside(std::string_view module) const {
    const std::string_view name = from_layers(module);
    for (const std::string& each : {std::string(name), with_layers(name)}) {
      const std::string beginning = each + ".";
      const auto found = endings_.lower_bound(beginning);
      if (found != endings_.end() && found->starts_with(beginning)) return true;
    }
    return false;
  }

  void add(std::string_view module) {
    const std::string_view name = from_layers(module);
    if (push_if_free(with_any_prefix(escaped(name, true)))) return;
    const std::size_t dot = name.find('.');
    const std::size_t second = name.find('.', dot + 1);
    if (second == std::string_view::npos || !is_digits(name.substr(dot + 1, second - dot - 1))) {
      static_cast<void>(push_single(name));
      return;
    }
    Group& group = groups_[{module.substr(0, module.size() - name.size()), name.substr(0, dot),
                            escaped(name.substr(second + 1), true)}];
    group.layers.emplace(name.substr(dot + 1, second - dot - 1));
    group.names.push_back(name);
  }

  // Returns all patterns: layers with the same modules share one if that is unambiguous.
  [[nodiscard]] std::vector<std::string> take() {
    for (auto& [key, group] : groups_) {
      const auto& [before, list, rest] = key;
      const std::string numbers = fmt::format("{}", fmt::join(group.layers, "|"));
      const std::string any = escaped(group.names.front(), true);
      const std::string block = any.substr(0, any.find(R"(\d+)"));
      const std::string layers = fmt::format(
          R"({}{}\.{})", block, group.layers.size() == 1 ? numbers : "(?:" + numbers + ")", rest);
      if (push_if_free(with_any_prefix(layers))) continue;
      std::erase_if(group.names, [&](std::string_view name) { return push_single(name); });
      if (group.names.empty() || push_by_part(before, any) || push_by_part(before, layers)) {
        continue;
      }
      for (const std::string_view name : group.names) push_by_part(before, escaped(name, false));
    }
    return std::move(patterns_);
  }

 private:
  struct Group {
    std::set<std::string> layers;
    std::vector<std::string_view> names;  // module names that begin at the block of layers
  };

  static std::string with_any_prefix(std::string_view pattern) {
    return fmt::format(R"((.*\.)?{}$)", pattern);
  }

  // Adds a pattern for the name under any prefix, unless other modules match it.
  bool push_single(std::string_view name) {
    if (endings_.contains(name) || endings_.contains(with_layers(name))) return false;
    push(with_any_prefix(escaped(name, false)));
    return true;
  }

  // Adds a pattern that requires one component of the prefix, or all of them, with any names after
  // each required component.
  bool push_by_part(std::string_view before, std::string_view pattern) {
    constexpr std::string_view between = R"(\.(.*\.)?)";
    std::string all;
    for (const std::string_view part : parts_of(before)) {
      const std::string each = fmt::format("{}{}", escaped(part, false), between);
      if (push_if_free(with_any_prefix(each + std::string(pattern)))) return true;
      all += each;
    }
    return !all.empty() && push_if_free(with_any_prefix(all + std::string(pattern)));
  }

  // Skips patterns that are too long: the caller's list contains the module's name anyway.
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

  std::vector<std::string> others_;      // names that no pattern may match, and their renamed forms
  std::set<std::string_view> endings_;   // each of others_, and its parts after each dot
  std::map<std::string, bool> is_free_;  // true if a pattern matches no other module
  // Modules by their prefix before the layers, the name of the list of layers, and the rest of the
  // name.
  std::map<std::tuple<std::string_view, std::string_view, std::string>, Group> groups_;
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
    const Pattern compiled = compile_module_pattern("^(?:" + pattern + ")");
    std::erase_if(left, [&](const std::string& each) { return is_in(*compiled, each); });
    patterns.push_back(pattern);
  };
  Patterns single(quantized);
  if (matches_any(std::string(outside_blocks), quantized)) {
    // The rules below are meant for blocks: for modules outside of blocks they could match a
    // quantized module under a different name, so these modules get single patterns.
    const Pattern outside = compile_module_pattern(fmt::format("^(?:{})", outside_blocks));
    const auto is_outside = [&](const std::string& each) { return is_in(*outside, each); };
    for (const std::string& each : plain) {
      if (is_outside(each)) single.add(each);
    }
    std::erase_if(left, is_outside);
    if (!matches_any(tied_heads, quantized)) patterns.emplace_back(tied_heads);
  }
  add(std::string(outside_blocks));
  for (const PlainRule& rule : plain_rules()) {
    if (rule.use != RuleUse::plain || !rule.is_linear) continue;
    add(fmt::format(".*(?:{})", rule.pattern));
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
