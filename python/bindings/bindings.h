// Declares the bind functions, one per core header, and helpers that the binding files share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/finding_json.h"
#include "base/named.h"
#include "base/text.h"
#include "base/unknown_word.h"
#include "loadstone/loadstone.h"
#include "tensor/unknown_dtype.h"
#include "text.h"

namespace loadstone::python {

namespace nb = nanobind;

using Extents = std::vector<std::uint64_t>;
// One entry per LoRA adapter: its factor, and the patterns of the tensors that it leaves out.
using AdapterRows = std::vector<std::pair<float, std::vector<std::string>>>;

// Call guard of each function that may read or write files, which can be remote. The GIL is held
// while arguments and results are converted, but not during the call.
using uses_files = nb::call_guard<nb::gil_scoped_release>;

void bind_build_info(nb::module_& module);
void bind_collection_pause(nb::module_& module);
void bind_error(nb::module_& module);
void bind_finding(nb::module_& module);
void bind_remote(nb::module_& module);
void bind_catalog(nb::module_& module);
void bind_recipe(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_execute(nb::module_& module);
void bind_offload(nb::module_& module);
void bind_audit(nb::module_& module);
void bind_convert(nb::module_& module);
void bind_verify(nb::module_& module);
void bind_kernels(nb::module_& module);
void bind_bnb(nb::module_& module);
void bind_scaled(nb::module_& module);

// Returns the dtype that Python code names, such as "BF16". An unknown name is the caller's error.
[[nodiscard]] inline Dtype dtype_argument(std::string_view text) {
  const auto dtype = parse_dtype(text);
  if (!dtype) throw Error("usage", unknown_dtype(text), {.field = "dtype"});
  return *dtype;
}

template <typename Enum>
[[nodiscard]] Enum enum_argument(const char* field, std::string_view text) {
  if (const auto known = from_name<Enum>(text)) return *known;
  throw Error("usage", unknown_word("word", text, names_of<Enum>()), {.field = field});
}

[[nodiscard]] inline std::vector<MergeAdapter> adapters_of(const AdapterRows& rows) {
  std::vector<MergeAdapter> adapters;
  for (const auto& [factor, ignore] : rows)
    adapters.push_back({.factor = factor, .ignore = ignore});
  return adapters;
}

// Returns the numeric fields of a report, keyed by field name.
template <typename Report>
[[nodiscard]] nb::dict numbers_of(const Report& report) {
  nb::dict numbers;
  visit_numbers<Report>(
      [&](const char* name, auto member, Joined) { numbers[name] = report.*member; });
  return numbers;
}

}  // namespace loadstone::python
