#include "bindings.h"
#include "shared_plan.h"

namespace loadstone::python {

void bind_audit(nb::module_& module) {
  // Proves the core's own work; Python audits the live model.
  module.def("require_delivered", [](const SharedPlan& plan, const Report& report) {
    audit(*plan, report).require_real();
  });
  module.def("audit_text", [](const SharedPlan& plan, const Report& report) {
    return audit(*plan, report).text();
  });
}

}  // namespace loadstone::python
