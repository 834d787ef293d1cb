#include "loadstone/finding.h"

#include <algorithm>
#include <tuple>

#include "base/named.h"

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

}  // namespace loadstone
