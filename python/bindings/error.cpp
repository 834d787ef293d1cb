#include "base/text.h"
#include "bindings.h"

namespace loadstone::python {

namespace {

// The error classes are defined in Python (loadstone/_base/errors.py), where users read and
// subclass them.
void raise_in_python(const Error& error) {
  const auto make = nb::module_::import_("loadstone._base.errors").attr("from_core");
  const Where& where = error.where();
  const nb::object offset =
      where.byte_offset ? nb::object(nb::int_(*where.byte_offset)) : nb::object(nb::none());
  const nb::object exception =
      make(error.what(), error.code(), error.message(), where.path, where.tensor, offset,
           where.field, where.found, where.expected, where.system_error);
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
}

}  // namespace

void bind_error(nb::module_& module) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void* /*unused*/) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });
  module.def("printable", &printable, nb::arg("text"), nb::arg("length_max") = 200);
  module.def(
      "without_secrets", [](std::string_view text) { return without_secrets(text); },
      nb::arg("text"));
  module.def("codes", [] {
    std::vector<std::tuple<std::string_view, std::string_view, std::string_view>> rows;
    for (const CodeInfo& info : all_codes())
      rows.emplace_back(info.code, info.meaning, info.advice);
    return rows;
  });
}

}  // namespace loadstone::python
