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
      for (std::size_t dot = 0; dot != std::string_view::npos; dot = name.find('.')) {
        if (dot > 0) name.remove_prefix(dot + 1);
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

  void add(std::string_view module, std::vector<std::string>& patterns) {
    const std::string_view name = from_layers(module);
    const auto push = [&](std::string pattern) {
      if (added_.insert(pattern).second) patterns.push_back(std::move(pattern));
    };
    std::string pattern = fmt::format(R"((.*\.)?{}$)", escaped(name, true));
    if (is_free(pattern)) return push(std::move(pattern));
    if (!endings_.contains(name)) {
      return push(fmt::format(R"((.*\.)?{}$)", escaped(name, false)));
    }
    // Adds one of the parts before it, in whatever order the library has them.
    std::string_view before = module.substr(0, module.size() - name.size());
    for (; !before.empty(); before.remove_prefix(before.find('.') + 1)) {
      const std::string_view part = before.substr(0, before.find('.'));
      if (part == "model") continue;
      pattern = fmt::format(R"((.*\.)?{}\.(.*\.)?{}$)", escaped(part, true), escaped(name, true));
      if (is_free(pattern)) return push(std::move(pattern));
    }
  }

 private:
  bool is_free(const std::string& pattern) {
    const auto [known, is_new] = is_free_.try_emplace(pattern);
    if (is_new) known->second = !matches_any(pattern, others_);
    return known->second;
  }

  const std::vector<std::string>& others_;
  std::set<std::string_view> endings_;   // of their names, from each dot on
  std::map<std::string, bool> is_free_;  // whether a pattern matches none of them
  std::set<std::string> added_;
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
    std::erase_if(left, [&](const std::string& each) {
      if (!is_in(*outside, each)) return false;
      single.add(each, patterns);
      return true;
    });
    if (!matches_any(tied_heads, quantized)) patterns.emplace_back(tied_heads);
  }
  add(std::string(outside_blocks));
  for (const PlainRule& rule : plain_rules()) {
    if (rule.is_linear) add(fmt::format(".*(?:{})", rule.pattern));
  }
  for (const std::string& module : left) single.add(module, patterns);
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
  std::vector<std::string> patterns;
  Patterns single(others);
  for (const std::string_view module : modules) single.add(module, patterns);
  return patterns;
}

}  // namespace loadstone
