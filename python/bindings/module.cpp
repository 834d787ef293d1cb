// Defines the extension module loadstone._core, which gives Python access to the C++ library.
#include "bindings.h"

NB_MODULE(_core, module) {
  using namespace loadstone::python;
  nb::set_leak_warnings(false);  // because scripts may still refer to objects when Python exits
  module.doc() = "The C++ core of loadstone. Private: use the functions of the package.";
  bind_build_info(module);
  bind_collection_pause(module);
  bind_error(module);
  bind_finding(module);
  bind_remote(module);
  bind_catalog(module);
  bind_recipe(module);
  bind_plan(module);
  bind_offload(module);
  bind_execute(module);
  bind_audit(module);
  bind_convert(module);
  bind_verify(module);
  bind_kernels(module);
  bind_bnb(module);
  bind_scaled(module);
}
