#include "storage/disk_space.h"

#include <fmt/format.h>

#include "base/text.h"

namespace loadstone {

std::optional<Finding> space_finding(std::string_view what, const std::string& path,
                                     std::uint64_t needed, std::optional<std::uint64_t> free) {
  if (!free || needed <= *free) return std::nullopt;
  return Finding{
      .severity = Severity::error,
      .code = "io.no_space",
      .message = fmt::format("{} '{}' needs {}, but the disk has only {} free", what,
                             printable(path, 400), human_bytes(needed), human_bytes(*free)),
      .suggestion = "free space, or choose a folder on another disk",
      .found = human_bytes(*free),
      .expected = human_bytes(needed)};
}

}  // namespace loadstone
