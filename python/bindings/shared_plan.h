// Declares a plan that Python owns.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "loadstone/plan.h"

namespace loadstone::python {

// A plan that is copied on write while a thread executes it without the GIL. The caller must hold
// the GIL.
class SharedPlan {
 public:
  explicit SharedPlan(Plan plan) : plan_(std::make_shared<Plan>(std::move(plan))) {}

  [[nodiscard]] const Plan& operator*() const noexcept { return *plan_; }
  [[nodiscard]] const Plan* operator->() const noexcept { return plan_.get(); }
  // Returns the plan in its present state, without later additions. The caller must hold the GIL
  // when it releases the pointer.
  [[nodiscard]] std::shared_ptr<const Plan> keep() const { return plan_; }

  void add_findings(const std::vector<Finding>& findings) {
    if (plan_.use_count() > 1) plan_ = std::make_shared<Plan>(*plan_);
    plan_->findings.insert(plan_->findings.end(), findings.begin(), findings.end());
    sort_findings(plan_->findings);
  }

  [[nodiscard]] SharedPlan with_findings(const std::vector<Finding>& findings) const {
    SharedPlan other = *this;
    other.add_findings(findings);
    return other;
  }

 private:
  std::shared_ptr<Plan> plan_;
};

}  // namespace loadstone::python
