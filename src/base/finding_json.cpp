#include "base/finding_json.h"

#include <fmt/format.h>

#include "base/text.h"

namespace loadstone {

std::string advised_message(const Finding& finding) {
  if (finding.suggestion.empty()) return finding.message;
  return fmt::format("{} ({})", finding.message, finding.suggestion);
}

std::string finding_lines(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    text += fmt::format("  {}: {} [{}]\n", name(finding.severity),
                        printable(advised_message(finding), 2000), finding.code);
  }
  return text;
}

}  // namespace loadstone
