#include "base/finding_json.h"

#include <fmt/format.h>

#include "base/text.h"

namespace loadstone {

std::string finding_lines(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    text += fmt::format("  {}: {} [{}]\n", name(finding.severity), printable(finding.message, 2000),
                        finding.code);
  }
  return text;
}

}  // namespace loadstone
