#include <cstring>

#include "bindings.h"
#include "kernels/cast.h"

namespace loadstone::python {

namespace {

// For the tests, which compare every pair of dtypes with torch.
nb::bytes cast_bytes(const nb::bytes& source, std::string_view source_name,
                     std::string_view target_name) {
  const Dtype from = dtype_argument(source_name);
  const Dtype to = dtype_argument(target_name);
  if (!can_cast(from, to)) {
    throw Error("plan.dtype", "no cast between these",
                {.found = std::string(name(from)), .expected = std::string(name(to))});
  }
  const std::size_t count = source.size() / element_bytes(from);
  std::vector<std::byte> target(count * element_bytes(to));
  cast_between(from, to).run(static_cast<const std::byte*>(source.data()), target.data(), count);
  return nb::bytes(target.data(), target.size());
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("cast", &cast_bytes, nb::arg("source"), nb::arg("source_dtype"),
             nb::arg("target_dtype"));
  module.def("can_cast", [](std::string_view source, std::string_view target) {
    return can_cast(dtype_argument(source), dtype_argument(target));
  });
}

}  // namespace loadstone::python
