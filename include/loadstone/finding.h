// Problems and notes that a catalog or a plan reports. Findings are data: loadstone collects all of
// them and goes on, and the caller decides. An error among them makes execute() throw before it
// reads a data byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

enum class Severity : std::uint8_t { info, warning, error };

// "info", "warning", "error"
[[nodiscard]] LOADSTONE_API std::string_view name(Severity severity) noexcept;

struct Finding {
  Severity severity = Severity::info;
  std::string code{};                  // one of all_codes(): "plan.missing", "ix.unlisted" ...
  std::string target{};                // the model's name; empty if no target is concerned
  std::vector<std::string> sources{};  // the expected or affected names in the checkpoint
  std::string message{};               // one sentence that names target and sources
  std::string suggestion{};            // nearest names, or the next step; may be empty
  std::string found{};
  std::string expected{};

  friend bool operator==(const Finding&, const Finding&) = default;
};

// Returns true if one of them has Severity::error.
[[nodiscard]] LOADSTONE_API bool has_errors(const std::vector<Finding>& findings) noexcept;

// Sorts for reading: most severe first, then by code, target and sources.
LOADSTONE_API void sort_findings(std::vector<Finding>& findings);
// Throws the first error among the findings, with their number.
LOADSTONE_API void require_no_errors(const std::vector<Finding>& findings);

}  // namespace loadstone
