// Problems and notes that a catalog or a plan reports. Findings are data: loadstone collects all of
// them and continues, and the caller decides. If a finding is an error, execute() throws before it
// reads a data byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

enum class Severity : std::uint8_t { info, warning, error };

// Returns "info", "warning" or "error".
[[nodiscard]] LOADSTONE_API std::string_view name(Severity severity) noexcept;

struct Finding {
  Severity severity = Severity::info;
  std::string code{};                  // one of all_codes(): "plan.missing", "ix.unlisted" ...
  std::string target{};                // name in the model; empty: not about one target
  std::vector<std::string> sources{};  // expected or affected names in the checkpoint
  std::string message{};               // one sentence that names target and sources
  std::string suggestion{};            // nearest names, or the next step; may be empty
  std::string found{};
  std::string expected{};

  friend bool operator==(const Finding&, const Finding&) = default;
};

// Returns true if a finding has Severity::error.
[[nodiscard]] LOADSTONE_API bool has_errors(const std::vector<Finding>& findings) noexcept;

// Sorts findings for display: most severe first, then by code, target and sources.
LOADSTONE_API void sort_findings(std::vector<Finding>& findings);
// Throws the first error among the findings, with the number of other errors in the message.
LOADSTONE_API void require_no_errors(const std::vector<Finding>& findings);

}  // namespace loadstone
