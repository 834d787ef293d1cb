// The verdict on a plan, and its findings in groups: the same words on the page and on a terminal.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/text_style.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

struct Verdict {
  Severity severity = Severity::info;  // of the worst finding; info: no problem
  std::string first;                   // whether it can be done, or was
  std::string next;                    // what to do
};

// `loaded`: the sentence about a completed load; empty: none.
[[nodiscard]] Verdict verdict_of(const Plan& plan, const std::string& loaded = {});

// The sentence that a load which followed the plan has proved.
[[nodiscard]] std::string proved_text(const Plan& plan);

// Runs of one severity and code: findings are sorted by these.
[[nodiscard]] std::vector<std::span<const Finding>> finding_groups(
    const std::vector<Finding>& findings);

// Verdict, figures, findings in groups, then the targets.
[[nodiscard]] std::string plan_text(const Plan& plan, const TextStyle& style);
// Both lines of a verdict.
[[nodiscard]] std::string verdict_text(const Verdict& verdict, const TextStyle& style);

}  // namespace loadstone
