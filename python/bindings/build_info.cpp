#include "loadstone/build_info.h"

#include "bindings.h"

namespace loadstone::python {

void bind_build_info(nb::module_& module) {
  module.def("build_info", [] {
    const BuildInfo info = build_info();
    nb::dict libraries;
    for (const auto& [name, version] : info.libraries) libraries[name.c_str()] = version;
    libraries["nanobind"] = NB_TOSTRING(NB_VERSION_MAJOR) "." NB_TOSTRING(
        NB_VERSION_MINOR) "." NB_TOSTRING(NB_VERSION_PATCH);
    nb::dict members;
    members["version"] = info.version;
    members["compiler"] = info.compiler;
    members["build_type"] = info.build_type;
    members["libraries"] = libraries;
    members["has_remote"] = info.has_remote;
    members["has_sha256"] = info.has_sha256;
    return members;
  });
}

}  // namespace loadstone::python
