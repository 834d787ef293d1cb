#include "plan/prefix.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>

#include "base/json_writer.h"
#include "base/pattern.h"
#include "base/text.h"
#include "plan/rules.h"

namespace loadstone {

namespace {

constexpr std::size_t prefix_names_max = 8;

using Names = std::vector<std::string_view>;
using Known = std::unordered_set<std::string_view>;

std::size_t fitting(const Names& names, const Known& known, std::size_t cut) {
  return static_cast<std::size_t>(std::ranges::count_if(
      names, [&](std::string_view name) { return known.contains(name.substr(cut)); }));
}

// Returns the prefixes, and sequences of prefixes, with which all names begin. The shortest comes
// first.
std::vector<std::string> common_prefixes(const Names& names, const Names& prefixes) {
  std::vector<std::string> found;
  std::string common;
  const auto is_next = [&](std::string_view prefix) {
    return std::ranges::all_of(names, [&](std::string_view name) {
      return name.substr(common.size()).starts_with(prefix);
    });
  };
  for (;;) {
    const auto next = std::ranges::find_if(prefixes, is_next);
    if (next == prefixes.end()) return found;
    common += *next;
    found.push_back(common);
  }
}

std::optional<Finding> partial(const Names& names, const Known& known, std::string_view prefix) {
  std::size_t count = 0;
  std::vector<std::string> wanted;
  for (const std::string_view name : names) {
    if (!name.starts_with(prefix)) continue;
    ++count;
    const bool is_wanted = !known.contains(name) && known.contains(name.substr(prefix.size()));
    if (is_wanted && wanted.size() < prefix_names_max) wanted.emplace_back(name);
  }
  if (wanted.empty()) return std::nullopt;
  return Finding{
      .severity = Severity::warning,
      .code = "plan.prefix",
      .sources = std::move(wanted),
      .message = fmt::format("only {} of {} names of the checkpoint begin with '{}', so "
                             "loadstone does not remove this prefix",
                             count, names.size(), printable(prefix)),
      .suggestion = "to remove the prefix, pass the rules " + prefix_rule_json(prefix, "")};
}

}  // namespace

Rule prefix_rule(std::string_view prefix, std::string_view replacement) {
  return {.op = RuleOp::rename,
          .sources = {re2::RE2::QuoteMeta(piece(prefix)) + "(.*)"},
          .targets = {Template::quoted(replacement) + "$1"}};
}

std::string prefix_rule_json(std::string_view prefix, std::string_view replacement) {
  JsonWriter json;
  json.begin_object();
  json.member(prefix, replacement);
  json.end_object();
  return json.take();
}

Stripping strip_prefix(const Catalog& catalog, const Skeleton& skeleton,
                       const std::vector<std::string>& prefixes, const Rules& rules) {
  Stripping result = {.rules = rules, .findings = {}};
  Names wanted;
  for (const std::string& prefix : prefixes) {
    if (!prefix.empty()) wanted.push_back(prefix);
  }
  Names names;
  const std::span tensors = std::span(catalog.tensors()).first(catalog.tensors_of(0).end);
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  if (wanted.empty() || names.empty()) return result;
  Known known;
  for (const Target& target : skeleton.targets) known.insert(target.name);

  const std::vector<std::string> chains = common_prefixes(names, wanted);
  if (!chains.empty() && fitting(names, known, 0) == 0) {
    const auto fits = [&](const std::string& chain) { return fitting(names, known, chain.size()); };
    // If several prefixes fit equally, max_element() returns the first, which is the shortest.
    const auto best = std::ranges::max_element(chains, {}, fits);
    const std::string& common = fits(*best) > 0 ? *best : chains.back();
    result.rules.push_back(prefix_rule(common, ""));
    result.findings.push_back(
        {.code = "plan.prefix",
         .message = fmt::format(
             "every name of the checkpoint begins with '{}'; loadstone removes this prefix",
             printable(common))});
  } else if (chains.empty() && rules.empty()) {
    for (const std::string_view prefix : wanted) {
      if (auto finding = partial(names, known, prefix)) {
        result.findings.push_back(std::move(*finding));
      }
    }
  }
  return result;
}

}  // namespace loadstone
