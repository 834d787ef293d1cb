#include "base/text.h"
#include "bindings.h"

namespace loadstone::python {

void bind_finding(nb::module_& module) {
  nb::class_<Finding>(module, "Finding")
      .def(
          "__init__",
          [](Finding* self, std::string_view severity, std::string code, std::string target,
             std::vector<std::string> sources, std::string message, std::string suggestion,
             std::string found, std::string expected) {
            new (self) Finding{.severity = enum_argument<Severity>("severity", severity),
                               .code = std::move(code),
                               .target = std::move(target),
                               .sources = std::move(sources),
                               .message = std::move(message),
                               .suggestion = std::move(suggestion),
                               .found = std::move(found),
                               .expected = std::move(expected)};
          },
          nb::arg("severity"), nb::arg("code"), nb::arg("target"), nb::arg("sources"),
          nb::arg("message"), nb::arg("suggestion") = "", nb::arg("found") = "",
          nb::arg("expected") = "")
      .def("__reduce__",
           [](nb::handle self) {
             const auto& finding = nb::cast<const Finding&>(self);
             return nb::make_tuple(
                 self.type(), nb::make_tuple(name(finding.severity), finding.code, finding.target,
                                             finding.sources, finding.message, finding.suggestion,
                                             finding.found, finding.expected));
           })
      .def_prop_ro("severity", [](const Finding& self) { return name(self.severity); })
      .def_ro("code", &Finding::code)
      .def_ro("target", &Finding::target)
      .def_ro("sources", &Finding::sources)
      .def_ro("message", &Finding::message)
      .def_ro("suggestion", &Finding::suggestion)
      .def_ro("found", &Finding::found)
      .def_ro("expected", &Finding::expected)
      .def("__eq__", [](const Finding& a, const Finding& b) { return a == b; })
      .def("__repr__", [](const Finding& self) {
        return "Finding(" + std::string(name(self.severity)) + ", " + self.code + ": " +
               printable(self.message, 2000) + ")";
      });
}

}  // namespace loadstone::python
