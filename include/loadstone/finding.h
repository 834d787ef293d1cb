// A problem or a note that a catalog or a plan reports. Findings are data: all of them are
// collected, none stops the work, and the caller decides. Errors among them stop execute() before
// it reads a data byte.
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
  std::string target{};                // the model's name; empty where no target is concerned
  std::vector<std::string> sources{};  // the expected or concerned names in the checkpoint
  std::string message{};               // one sentence that names target and sources
  std::string suggestion{};            // nearest names, or what to do; may be empty
  std::string found{};
  std::string expected{};

  friend bool operator==(const Finding&, const Finding&) = default;
};

// Whether one of them has Severity::error.
[[nodiscard]] LOADSTONE_API bool has_errors(const std::vector<Finding>& findings) noexcept;

// Most severe first, then by code, target and sources: the order in which people should read them.
LOADSTONE_API void sort_findings(std::vector<Finding>& findings);

}  // namespace loadstone
