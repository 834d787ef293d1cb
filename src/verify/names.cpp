#include "verify/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "plan/prefix.h"

namespace loadstone {

namespace {

std::vector<std::string> names_of(const VerifyReport& report, DifferenceKind kind) {
  std::vector<std::string> names;
  for (const Difference& each : report.differences) {
    if (each.kind == kind) names.push_back(each.name);
  }
  std::ranges::sort(names);
  return names;
}

// Returns the prefixes of both lists if the names differ only by them. The lists must be sorted;
// names that differ only by a prefix have the same order.
std::optional<std::pair<std::string, std::string>> other_prefix(
    const std::vector<std::string>& first, const std::vector<std::string>& second) {
  if (first.size() != second.size() || first.size() < 2) return std::nullopt;
  const std::string_view a = first.front();
  const std::string_view b = second.front();
  const auto ends = std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend());
  auto rest = static_cast<std::size_t>(ends.first - a.rbegin());
  const auto is_prefix = [](std::string_view text) { return text.empty() || text.ends_with('.'); };
  const auto prefix = [&](std::string_view name) { return name.substr(0, name.size() - rest); };
  while (rest > 0 && !(is_prefix(prefix(a)) && is_prefix(prefix(b)))) --rest;
  const std::pair found(std::string(prefix(a)), std::string(prefix(b)));
  const auto differ_so = [&](std::string_view one, std::string_view other) {
    return one.starts_with(found.first) && other.starts_with(found.second) &&
           one.substr(found.first.size()) == other.substr(found.second.size());
  };
  if (rest == 0 || !std::ranges::equal(first, second, differ_so)) return std::nullopt;
  return found;
}

}  // namespace

std::optional<Finding> prefix_differs(std::size_t count, VerifyReport& report) {
  const std::vector<std::string> missing = names_of(report, DifferenceKind::missing);
  const std::vector<std::string> others = names_of(report, DifferenceKind::unexpected);
  if (2 * missing.size() <= count) return std::nullopt;
  const auto prefix = other_prefix(missing, others);
  if (!prefix) return std::nullopt;
  std::erase_if(report.differences, [](const Difference& each) {
    return each.kind == DifferenceKind::missing || each.kind == DifferenceKind::unexpected;
  });
  return Finding{
      .severity = Severity::warning,
      .code = "verify.names",
      .message =
          fmt::format("{} of {} names differ only by a prefix ('{}' in the first checkpoint "
                      "is '{}' in the second), so their values were not compared",
                      missing.size(), count, printable(missing.front()), printable(others.front())),
      .suggestion = fmt::format("to compare them, pass the rules {} (--rules FILE, rules= in "
                                "Python)",
                                prefix_rule_json(prefix->first, prefix->second))};
}

std::optional<Finding> names_differ(std::size_t count, VerifyReport& report) {
  if (auto finding = prefix_differs(count, report)) return finding;
  const std::size_t missing = names_of(report, DifferenceKind::missing).size();
  if (2 * missing <= count || names_of(report, DifferenceKind::unexpected).empty()) return {};
  return Finding{
      .severity = Severity::warning,
      .code = "verify.names",
      .message = fmt::format(
          "{} of {} names of the first checkpoint are missing in the second; if 'loadstone "
          "convert' renamed the tensors, pass its options to verify too: --rules FILE, or "
          "--converter DIR with `python -m loadstone verify`",
          missing, count)};
}

}  // namespace loadstone
