// Formats the verdict on a plan and its grouped findings, with the same words for the HTML page and
// for the terminal.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/text_style.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

struct Verdict {
  Severity severity = Severity::info;  // worst severity of the findings; info: no problem
  std::string first;                   // states if the plan can be executed, or was executed
  std::string next;                    // the suggested action
};

// `loaded` is the sentence about a completed load; empty if nothing was loaded.
[[nodiscard]] Verdict verdict_of(const Plan& plan, const std::string& loaded = {});

// Returns the sentence that describes what a completed load of the plan has confirmed.
[[nodiscard]] std::string proved_text(const Plan& plan);

// Splits the sorted findings into runs of equal severity and code.
[[nodiscard]] std::vector<std::span<const Finding>> finding_groups(
    const std::vector<Finding>& findings);

// Returns the verdict, the totals, the grouped findings and the targets as text. `free_bytes`: the
// free memory to show next to the planned peak; nullopt: none.
[[nodiscard]] std::string plan_text(const Plan& plan, const TextStyle& style,
                                    std::optional<std::uint64_t> free_bytes = {});
// Returns both lines of a verdict as text.
[[nodiscard]] std::string verdict_text(const Verdict& verdict, const TextStyle& style);

}  // namespace loadstone
