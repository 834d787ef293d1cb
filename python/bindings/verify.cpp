#include "loadstone/verify.h"

#include "bindings.h"
#include "observer.h"

namespace loadstone::python {

namespace {

VerifyReport compared(const Conversion& conversion, const Catalog& output, nb::object callback) {
  PythonObserver observer(std::move(callback));
  const auto storage = observer.storage_for(*conversion.plan.catalog);
  return observer.watch([&] {
    return compare_with_conversion(conversion, output,
                                   {.storage = storage.get(), .observer = &observer});
  });
}

}  // namespace

void bind_verify(nb::module_& module) {
  nb::class_<VerifyReport>(module, "VerifyReport")
      .def("to_json", [](const VerifyReport& self) { return to_json(self); })
      .def("to_table", [](const VerifyReport& self) { return to_table(self); });
  module.def("compare_with_conversion", &compared, nb::arg("conversion"), nb::arg("output"),
             nb::arg("progress").none() = nb::none());
}

}  // namespace loadstone::python
