#include "bindings.h"
#include "offload/offload_files.h"
#include "offload/offload_folder.h"
#include "shared_plan.h"

namespace loadstone::python {

namespace {

// Returns the entries in the layout of index.json, for accelerate's reader of offloaded tensors.
nb::dict index_of(const std::vector<OffloadEntry>& entries) {
  nb::dict index;
  for (const OffloadEntry& entry : entries) {
    nb::dict row;
    if (!entry.safetensors_file.empty()) {
      row["safetensors_file"] = entry.safetensors_file;
      row["weight_name"] = entry.weight_name;
    }
    row["dtype"] = entry.dtype;
    if (entry.is_written || entry.safetensors_file.empty()) {
      row["shape"] = nb::list(nb::cast(entry.shape.extents()));
    }
    index[nb::str(entry.target.data(), entry.target.size())] = row;
  }
  return index;
}

}  // namespace

void bind_offload(nb::module_& module) {
  nb::class_<FileLock>(module, "FileLock").def_prop_ro("path", &FileLock::path);
  nb::class_<OffloadFolder>(module, "OffloadFolder")
      .def("index", [](const OffloadFolder& self) { return index_of(self.entries()); })
      .def("value",
           [](OffloadFolder& self, const std::string& name) {
             const auto bytes = self.value(name);
             return nb::bytes(bytes.data(), bytes.size());
           })
      .def(
          "add",
          [](OffloadFolder& self, const std::string& name, std::string_view dtype,
             const Extents& shape, std::uintptr_t address, std::uint64_t byte_count) {
            const auto* const data = reinterpret_cast<const std::byte*>(address);  // NOLINT
            self.add(name, dtype_argument(dtype), Shape(shape),
                     {data, static_cast<std::size_t>(byte_count)});
          },
          uses_files())
      .def("rename", &OffloadFolder::rename)
      .def("remove", &OffloadFolder::remove)
      .def("retype",
           [](OffloadFolder& self, const std::string& name, std::string_view dtype,
              const Extents& shape) { self.retype(name, dtype_argument(dtype), Shape(shape)); })
      .def("tie", &OffloadFolder::tie, uses_files())
      .def("lock_values", &OffloadFolder::lock_values, uses_files())
      .def("commit", &OffloadFolder::commit, uses_files())
      .def("abandon", &OffloadFolder::abandon, uses_files())
      .def_prop_ro("is_committed", &OffloadFolder::is_committed)
      .def_prop_ro("sync_seconds", &OffloadFolder::sync_seconds);
  module.attr("OFFLOAD_INDEX_FILE") = offload_index_file;
  module.def("offload_index", [](const SharedPlan& plan) {
    return index_of(offload_entries(*plan, plan->catalog->storage()));
  });
}

}  // namespace loadstone::python
