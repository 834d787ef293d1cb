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

  // Whether one of them is in the module under any prefix.
  [[nodiscard]] bool is_inside(std::string_view module) const {
    const std::string beginning = fmt::format("{}.", from_layers(module));
    const auto found = endings_.lower_bound(beginning);
    return found != endings_.end() && found->starts_with(beginning);
  }

  void add(std::string_view module, std::vector<std::string>& patterns) {
    const std::string_view name = from_layers(module);
    std::string pattern = fmt::format(R"((.*\.)?{}$)", escaped(name, true));
    const auto [known, is_new] = is_free_.try_emplace(pattern);
    if (is_new) known->second = !matches_any(pattern, others_);
    if (!known->second) {
      if (endings_.contains(name)) return;
      pattern = fmt::format(R"((.*\.)?{}$)", escaped(name, false));
    } else if (!is_new) {
      return;
    }
    patterns.push_back(std::move(pattern));
  }

 private:
  const std::vector<std::string>& others_;
  std::set<std::string_view> endings_;   // of their names, from each dot on
  std::map<std::string, bool> is_free_;  // whether a pattern matches none of them
};

}  // namespace

std::vector<std::string> patterns_of_plain(const std::vector<std::string>& plain,
                                           const std::vector<std::string>& quantized) {
  std::vector<std::string> candidates = {std::string(outside_blocks)};
  for (const PlainRule& rule : plain_rules()) {
    if (rule.is_linear) candidates.push_back(fmt::format(".*(?:{})", rule.pattern));
  }
  std::vector<std::string> left = plain;
  std::vector<std::string> patterns;
  for (std::string& candidate : candidates) {
    if (!matches_any(candidate, left) || matches_any(candidate, quantized)) continue;
    const Pattern compiled = compile("^(?:" + candidate + ")");
    std::erase_if(left, [&](const std::string& each) { return is_in(*compiled, each); });
    patterns.push_back(std::move(candidate));
  }
  Patterns single(quantized);
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
