#include "base/finding_json.h"

#include <fmt/format.h>

#include <cstddef>
#include <map>
#include <utility>

#include "base/text.h"

namespace loadstone {

std::string advised_message(const Finding& finding) {
  if (finding.suggestion.empty()) return finding.message;
  return fmt::format("{} ({})", finding.message, finding.suggestion);
}

std::string finding_lines(const std::vector<Finding>& findings) {
  std::map<std::pair<Severity, std::string>, std::size_t> counts;
  std::string text;
  for (const Finding& finding : findings) {
    if (++counts[{finding.severity, finding.code}] > lines_alike_max) continue;
    text += fmt::format("  {}: {} [{}]\n", name(finding.severity),
                        printable(advised_message(finding), 2000), finding.code);
  }
  for (const auto& [group, count] : counts) {
    if (count <= lines_alike_max) continue;
    text += fmt::format("  {}: {} more [{}]\n", name(group.first), count - lines_alike_max,
                        group.second);
  }
  return text;
}

}  // namespace loadstone
