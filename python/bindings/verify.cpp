#include "loadstone/verify.h"

#include "bindings.h"
#include "observer.h"

namespace loadstone::python {

namespace {

VerifyReport values_compared(const Catalog& first, const Catalog& second, bool lossless,
                             unsigned threads, nb::object callback) {
  PythonObserver observer(std::move(callback));
  return observer.watch([&] {
    return compare(first, second,
                   {.threads = threads, .observer = &observer, .require_lossless = lossless});
  });
}

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
  module.def("compare", &values_compared, nb::arg("first"), nb::arg("second"),
             nb::arg("lossless") = false, nb::arg("threads") = 0,
             nb::arg("progress").none() = nb::none());
  module.def("compare_with_conversion", &compared, nb::arg("conversion"), nb::arg("output"),
             nb::arg("progress").none() = nb::none());
}

}  // namespace loadstone::python
