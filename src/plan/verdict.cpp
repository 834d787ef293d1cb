#include "plan/verdict.h"

#include <algorithm>

#include "base/text.h"

namespace loadstone {

Verdict verdict_of(const Plan& plan, const std::string& loaded) {
  const auto count_of = [&](Severity severity) {
    return static_cast<std::uint64_t>(
        std::ranges::count(plan.findings, severity, &Finding::severity));
  };
  const std::uint64_t errors = count_of(Severity::error);
  const std::uint64_t warnings = count_of(Severity::warning);
  if (errors > 0) {
    return {Severity::error, counted(errors, "error") + ": this plan cannot be carried out",
            "Nothing was read. Mend what stands below, then plan again."};
  }
  Verdict verdict = {Severity::info, "OK: every target has an origin", "The load can begin."};
  if (!loaded.empty()) {
    verdict.first = loaded;
    verdict.next = proved_text(plan);
  }
  if (warnings > 0) {
    verdict.severity = Severity::warning;
    verdict.next = counted(warnings, "warning") + " below. " + verdict.next;
  }
  return verdict;
}

std::string proved_text(const Plan& plan) {
  const auto excluded = std::ranges::count_if(plan.targets, [](const PlannedTarget& target) {
    return target.recipe.origin == Origin::excluded;
  });
  if (excluded == 0) return "Every target has a value, and an origin for it.";
  return "Every target has a value and an origin, but for " +
         counted(static_cast<std::uint64_t>(excluded), "target") + " without one on purpose.";
}

std::vector<std::span<const Finding>> finding_groups(const std::vector<Finding>& findings) {
  std::vector<std::span<const Finding>> groups;
  for (auto begin = findings.begin(); begin != findings.end();) {
    const auto end = std::find_if(begin, findings.end(), [&](const Finding& each) {
      return each.code != begin->code || each.severity != begin->severity;
    });
    groups.emplace_back(begin, end);
    begin = end;
  }
  return groups;
}

std::string verdict_text(const Verdict& verdict, const TextStyle& style) {
  std::string text;
  switch (verdict.severity) {
    case Severity::error:
      text = style.error(verdict.first);
      break;
    case Severity::warning:
      text = style.warning(verdict.first);
      break;
    case Severity::info:
      text = style.ok(verdict.first);
      break;
  }
  return text + '\n' + verdict.next + '\n';
}

}  // namespace loadstone
