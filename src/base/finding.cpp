#include "loadstone/finding.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "base/named.h"
#include "base/only_errors.h"
#include "loadstone/error.h"

namespace loadstone {

std::string_view name(Severity severity) noexcept {
  return name_among({"info", "warning", "error"}, severity);
}

bool has_errors(const std::vector<Finding>& findings) noexcept {
  return std::ranges::any_of(findings,
                             [](const Finding& f) { return f.severity == Severity::error; });
}

void sort_findings(std::vector<Finding>& findings) {
  std::ranges::stable_sort(findings, [](const Finding& a, const Finding& b) {
    return std::tie(b.severity, a.code, a.target, a.sources) <
           std::tie(a.severity, b.code, b.target, b.sources);
  });
}

void require_no_errors(const std::vector<Finding>& findings) {
  only_errors([&] {
    const auto is_error = [](const Finding& f) { return f.severity == Severity::error; };
    const auto first = std::ranges::find_if(findings, is_error);
    if (first == findings.end()) return;
    const auto more = static_cast<std::uint64_t>(std::ranges::count_if(findings, is_error) - 1);
    std::string message = first->message;
    if (more > 0) message += fmt::format(" (and {})", counted(more, "more error"));
    throw Error(first->code, message,
                {.tensor = first->target, .found = first->found, .expected = first->expected});
  });
}

}  // namespace loadstone
