// What the binding files share. One file for each core header; module.cpp calls them in order.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string_view>
#include <vector>

#include "loadstone/loadstone.h"
#include "text.h"

namespace loadstone::python {

namespace nb = nanobind;

void bind_error(nb::module_& module);
void bind_finding(nb::module_& module);
void bind_catalog(nb::module_& module);
void bind_recipe(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_execute(nb::module_& module);
void bind_offload(nb::module_& module);
void bind_audit(nb::module_& module);
void bind_convert(nb::module_& module);
void bind_kernels(nb::module_& module);
void bind_bnb(nb::module_& module);
void bind_scaled(nb::module_& module);

// Python hands over names ("BF16"); an unknown one is a mistake of the caller.
[[nodiscard]] inline Dtype dtype_argument(std::string_view text) {
  const auto dtype = dtype_from_user(text);
  if (!dtype) {
    throw Error("usage", "unknown dtype", {.field = "dtype", .found = std::string(text)});
  }
  return *dtype;
}

[[nodiscard]] inline UnexpectedPolicy unexpected_argument(std::string_view text) {
  if (text == "warn") return UnexpectedPolicy::warn;
  if (text == "error") return UnexpectedPolicy::error;
  if (text == "ignore") return UnexpectedPolicy::ignore;
  throw Error(
      "usage", "no such policy",
      {.field = "unexpected", .found = std::string(text), .expected = "warn, error or ignore"});
}

}  // namespace loadstone::python
