// Proof after the fact: every target has a value with an origin.
#pragma once

#include <string>
#include <vector>

#include "loadstone/execute.h"
#include "loadstone/export.h"
#include "loadstone/plan.h"

namespace loadstone {

// Plain data. What each list holds are targets' names.
struct LOADSTONE_API Audit {
  std::vector<Provenance> provenance;
  std::vector<std::string> on_meta;      // without memory, and no rule excludes them
  std::vector<std::string> unaccounted;  // no origin, or fewer bytes written than the target has
  std::vector<std::string> not_held;     // no value in memory on purpose; the reason says why

  [[nodiscard]] bool ok() const noexcept { return on_meta.empty() && unaccounted.empty(); }
  // Throws Error "audit.on_meta" or "audit.unaccounted" that names the first few and the count.
  void require_real() const;
  // One line that can be trusted, then counts by origin.
  [[nodiscard]] std::string text() const;
};

[[nodiscard]] LOADSTONE_API Audit audit(const Plan& plan, const Report& report);

}  // namespace loadstone
