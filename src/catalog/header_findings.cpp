#include "catalog/header_findings.h"

#include <algorithm>
#include <iterator>

#include "catalog/expert_series.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

std::vector<Finding> header_findings(const Catalog& catalog) {
  std::vector<Finding> findings = catalog.quantized().findings();
  for (Finding& finding : findings) {
    if (finding.code == "plan.encoding") finding.message += "; the file itself may be valid";
  }
  const std::size_t others = findings.size();
  (void)check_expert_series(catalog, findings);
  for (std::size_t i = others; i < findings.size(); ++i) {
    if (findings[i].severity == Severity::warning) findings[i].severity = Severity::info;
  }
  return findings;
}

std::vector<Finding> all_findings(const Catalog& catalog) {
  std::vector<Finding> findings = catalog.findings();
  std::ranges::move(header_findings(catalog), std::back_inserter(findings));
  sort_findings(findings);
  return findings;
}

int exit_status(const std::vector<Finding>& findings) noexcept {
  int status = 0;
  for (const Finding& finding : findings) {
    if (finding.severity == Severity::error) status = std::max(status, exit_status(finding.code));
  }
  return status;
}

}  // namespace loadstone
