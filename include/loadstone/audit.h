// Declares the audit, which checks after a load that every target has a value and an origin.
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
  std::vector<std::string> on_meta;      // targets without memory that are not excluded
  std::vector<std::string> unaccounted;  // no origin, or fewer bytes written than the target has
  // Targets that the load deliberately left out of memory. Their provenance gives the reason.
  std::vector<std::string> not_held;

  [[nodiscard]] bool ok() const noexcept { return on_meta.empty() && unaccounted.empty(); }
  // Throws Error "audit.on_meta" or "audit.unaccounted", with the number of targets and the first
  // few names, if ok() is false.
  void require_real() const;
  // Returns one line with the verdict, then the number of targets per origin.
  [[nodiscard]] std::string text() const;
};

[[nodiscard]] LOADSTONE_API Audit audit(const Plan& plan, const Report& report);

}  // namespace loadstone
