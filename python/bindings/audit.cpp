#include "bindings.h"
#include "shared_plan.h"

namespace loadstone::python {

void bind_audit(nb::module_& module) {
  // Checks the report of a load. Python code audits the live model.
  module.def("require_delivered", [](const SharedPlan& plan, const Report& report) {
    audit(*plan, report).require_real();
  });
  module.def("audit_text", [](const SharedPlan& plan, const Report& report) {
    return audit(*plan, report).text();
  });
}

}  // namespace loadstone::python
