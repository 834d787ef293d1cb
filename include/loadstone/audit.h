// Proves after a load that every target has a value with an origin.
#pragma once

#include <string>
#include <vector>

#include "loadstone/execute.h"
#include "loadstone/export.h"
#include "loadstone/plan.h"

namespace loadstone {

// Plain data. The lists contain names of targets.
struct LOADSTONE_API Audit {
  std::vector<Provenance> provenance;
  std::vector<std::string> on_meta;      // without memory and not excluded
  std::vector<std::string> unaccounted;  // no origin, or fewer bytes written than the target has
  std::vector<std::string> not_held;     // deliberately not in memory; their origin has the reason

  [[nodiscard]] bool ok() const noexcept { return on_meta.empty() && unaccounted.empty(); }
  // Throws Error "audit.on_meta" or "audit.unaccounted" that names the first few and their count.
  void require_real() const;
  // One line with the verdict, then counts by origin.
  [[nodiscard]] std::string text() const;
};

[[nodiscard]] LOADSTONE_API Audit audit(const Plan& plan, const Report& report);

}  // namespace loadstone
