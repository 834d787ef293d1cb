#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>

#include <functional>

#include "bindings.h"
#include "load/mapped_shard.h"
#include "load/report.h"
#include "named_options.h"
#include "observer.h"
#include "offload/offload_folder.h"
#include "plan/values.h"
#include "receipt/receipt_file.h"
#include "receipt/recorder.h"
#include "shared_plan.h"

namespace loadstone::python {

namespace {

// Address, size in bytes, and dtype. Address 0 means that this call does not load the target.
using DestinationRow = std::tuple<std::uintptr_t, std::uint64_t, std::string_view>;
// Index of a target, and the address and the size in bytes of each of its components.
using PartsRow = std::pair<std::size_t, std::vector<std::pair<std::uintptr_t, std::uint64_t>>>;

// Copies with Python functions: allocate(device, bytes), copy(device, to, from, bytes) and
// read(device, from, to, bytes), where `to` and `from` are addresses. Each function returns when
// its work is complete.
class PythonDevice final : public Device {
 public:
  explicit PythonDevice(nb::object functions) : functions_(std::move(functions)) {}

  std::byte* allocate(std::string_view device, std::uint64_t bytes) override {
    std::uintptr_t address = 0;
    call("memory.host", device, "allocate", [&](const nb::object& allocate, const nb::str& name) {
      address = nb::cast<std::uintptr_t>(allocate(name, bytes));
    });
    return reinterpret_cast<std::byte*>(address);  // NOLINT
  }
  void free(std::byte*) noexcept override {}  // Python owns the memory

  void copy(unsigned, std::string_view device, std::byte* to,
            std::span<const std::byte> from) override {
    call("device.driver", device, "copy", [&](const nb::object& copy, const nb::str& name) {
      copy(name, address_of(to), address_of(from.data()), from.size());
    });
  }
  void wait(unsigned) override {}
  void read(std::string_view device, const std::byte* from, std::span<std::byte> to) override {
    call("device.driver", device, "read", [&](const nb::object& read, const nb::str& name) {
      read(name, address_of(from), address_of(to.data()), to.size());
    });
  }

 private:
  static std::uintptr_t address_of(const std::byte* memory) {
    return reinterpret_cast<std::uintptr_t>(memory);  // NOLINT
  }

  template <typename Call>
  void call(const char* code, std::string_view device, const char* function,
            const Call& call) const {
    const nb::gil_scoped_acquire acquire;
    try {
      call(functions_.attr(function), nb::str(device.data(), device.size()));
    } catch (const nb::python_error& error) {
      throw Error(code, std::string("the device's library failed to ") + function,
                  {.field = std::string(device), .found = error.what()});
    }
  }

  nb::object functions_;
};

// Returns the plan without the offload files that an earlier call wrote.
Plan without_offload(const Plan& plan) {
  Plan rest = plan;
  for (PlannedTarget& target : rest.targets) {
    if (target.delivery == Delivery::disk_write) target.delivery = Delivery::none;
  }
  return rest;
}

std::vector<Destination> destinations_of(const std::vector<DestinationRow>& rows,
                                         const std::vector<PartsRow>& parts) {
  std::vector<Destination> destinations;
  destinations.reserve(rows.size());
  for (const auto& [address, byte_count, dtype] : rows) {
    destinations.push_back({.data = reinterpret_cast<std::byte*>(address),  // NOLINT
                            .byte_count = byte_count,
                            .dtype = dtype_argument(dtype)});
  }
  for (const auto& [target, memory] : parts) {
    for (const auto& [address, byte_count] : memory) {
      destinations.at(target).parts.emplace_back(reinterpret_cast<std::byte*>(address),  // NOLINT
                                                 byte_count);
    }
  }
  return destinations;
}

// Keeps the storage alive as long as the folder, which uses it.
std::shared_ptr<OffloadFolder> with_storage(std::shared_ptr<OffloadFolder> folder,
                                            std::shared_ptr<Storage> storage) {
  const auto both =
      std::make_shared<std::pair<std::shared_ptr<Storage>, std::shared_ptr<OffloadFolder>>>(
          std::move(storage), std::move(folder));
  return {both, both->second.get()};
}

Report execute_plan(const SharedPlan& shared, const std::vector<DestinationRow>& rows,
                    unsigned threads, nb::object callback, const nb::kwargs& given) {
  NamedOptions named(given);
  auto destinations = destinations_of(rows, named.take<std::vector<PartsRow>>("parts"));
  PythonObserver observer(std::move(callback));
  ExecuteOptions options;
  options.threads = threads;
  const auto partial = named.take<bool>("partial");
  named.take("receipt", options.receipt);
  named.take("has_pages", options.has_pages);
  named.take("device", options.device);
  named.take("read_ahead_bytes", options.read_ahead_bytes);
  named.take("interleave", options.interleave);
  named.take("own_offload_file", options.own_offload_file);
  // Address of an array with one byte per target.
  const auto begun = named.take<std::uintptr_t>("begun");
  options.begun = reinterpret_cast<std::uint8_t*>(begun);  // NOLINT
  named.done();
  options.observer = &observer;
  options.holds_offload = true;  // do not commit yet: libraries add files to the folder
  const std::shared_ptr<const Plan> plan = shared.keep();
  for (std::size_t i = 0; options.device != nullptr && i < plan->targets.size(); ++i) {
    if (value_of(plan->targets[i]).goes_to_device()) destinations.at(i).kind = MemoryKind::device;
  }
  const std::shared_ptr<Storage> storage = observer.storage_for(*plan->catalog);
  options.storage = storage.get();
  Report report = observer.watch([&] {
    return partial ? execute(without_offload(*plan), destinations, options)
                   : execute(*plan, destinations, options);
  });
  if (report.offload != nullptr) report.offload = with_storage(report.offload, storage);
  return report;
}

// Joins the reports of several calls that each loaded some of the targets. If `plan` is given, all
// of its targets count as loaded.
Report merge_reports(const std::vector<Report>& reports, const SharedPlan* plan) {
  Report all = reports.at(0);
  for (std::size_t i = 1; i < reports.size(); ++i) {
    const Report& more = reports[i];
    for (std::size_t t = 0; t < all.provenance.size(); ++t) {
      if (more.provenance.at(t).bytes_written > all.provenance[t].bytes_written) {
        all.provenance[t] = more.provenance[t];
      }
    }
    join_numbers(all, more);
    for (const Finding& finding : more.findings) {
      if (std::ranges::count(all.findings, finding) == 0) all.findings.push_back(finding);
    }
  }
  sort_findings(all.findings);
  if (plan != nullptr) {
    const auto& targets = (*plan)->targets;
    all.provenance = make_provenance(**plan, [&](std::size_t i) {
      return targets[i].delivery == Delivery::memory ? targets[i].byte_count() : 0;
    });
  }
  if (all.receipt == nullptr || reports.size() == 1) return all;
  std::vector<Receipt> receipts;
  for (const Report& report : reports) receipts.push_back(*report.receipt);
  all.receipt = std::make_shared<Receipt>(joined_receipt(all.receipt->kind, receipts));
  return all;
}

std::shared_ptr<MappedShard> open_mapped(const Shard& shard) {
  const nb::gil_scoped_release release;
  return MappedShard::open(shard);
}

// Returns a mapped shard as an array of bytes. Tensors made from the array keep the array alive,
// and the array keeps the mapping alive.
nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>> map_shard(const SharedPlan& plan,
                                                              std::size_t index) {
  const std::shared_ptr<const Catalog> catalog = plan->catalog;
  const Shard& shard = catalog->shards().at(index);
  auto* mapping = new std::shared_ptr<MappedShard>(open_mapped(shard));
  const nb::capsule owner(mapping, [](void* pointer) noexcept {
    delete static_cast<std::shared_ptr<MappedShard>*>(pointer);
  });
  const auto bytes = (*mapping)->bytes(0, shard.identity.bytes);
  return {bytes.data(), {bytes.size()}, owner};
}

// Returns the fields of Python's Provenance, in order.
nb::tuple provenance_row(const Provenance& item) {
  nb::list sources;
  for (const SourceRange& range : item.sources) {
    sources.append(nb::make_tuple(range.tensor, range.shard, range.offset_begin, range.offset_end));
  }
  return nb::make_tuple(item.target, name(item.origin), name(item.kind), name(item.delivery),
                        nb::tuple(sources), item.device, name(item.dtype),
                        nb::tuple(nb::cast(item.shape.extents())), item.tie_of, item.reason,
                        item.bytes_written, item.encoding, nb::tuple(nb::cast(item.merged)));
}

}  // namespace

void bind_execute(nb::module_& module) {
  nb::class_<Report>(module, "Report")
      .def("__len__", [](const Report& self) { return self.provenance.size(); })
      .def("provenance",
           [](const Report& self, std::size_t index) {
             return provenance_row(self.provenance.at(index));
           })
      .def_ro("offload", &Report::offload)
      .def_ro("findings", &Report::findings)
      .def("numbers", &numbers_of<Report>)
      .def("receipt_json",
           [](const Report& self) -> std::optional<std::string> {
             if (self.receipt == nullptr) return std::nullopt;
             return to_json(*self.receipt);
           })
      .def("to_json", [](const Report& self) { return to_json(self); });
  module.def("execute", &execute_plan, nb::arg("plan"), nb::arg("destinations"),
             nb::arg("threads") = 0, nb::arg("progress").none() = nb::none(), nb::arg("options"));
  nb::class_<Device>(module, "Device");
  nb::class_<PythonDevice, Device>(module, "PythonDevice")
      .def(nb::init<nb::object>(), nb::arg("functions"));
  module.def("open_cuda", &open_cuda, nb::arg("library"));
  module.attr("RECEIPT_JSON_BYTES_MAX") = receipt_json_bytes_max;
  module.def("checked_receipt",
             [](const std::string& text) { return to_json(receipt_from_json(text)); });
  module.def("digest_memory",
             [](std::string_view kind, std::uintptr_t address, std::uint64_t byte_count) {
               const nb::gil_scoped_release release;
               const auto* const data = reinterpret_cast<const std::byte*>(address);  // NOLINT
               return digest_of(digest_kind(kind), {data, byte_count});
             });
  module.def("merge_reports", &merge_reports, nb::arg("reports"),
             nb::arg("plan").none() = nb::none());
  module.def("map_shard", &map_shard);
}

}  // namespace loadstone::python
