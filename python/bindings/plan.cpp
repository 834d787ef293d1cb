#include <utility>

#include "base/pattern.h"
#include "bindings.h"
#include "boxes/decodings.h"
#include "catalog/deepspeed.h"
#include "catalog/lacking.h"
#include "catalog/module_patterns.h"
#include "catalog/series.h"
#include "load/duration.h"
#include "loadstone/execute.h"
#include "loadstone/machine.h"
#include "loadstone/page.h"
#include "named_options.h"
#include "offload/offload.h"
#include "plan/devices.h"
#include "plan/origins.h"
#include "plan/prefix.h"
#include "plan/rules.h"
#include "shared_plan.h"

namespace loadstone::python {

namespace {

// target, encoding, dialect, block_size, nested, nested_offset, group
using QuantizeRow = std::tuple<std::string, std::string, std::string, std::uint32_t, bool,
                               std::optional<float>, std::string>;
using LackingRow =
    std::tuple<std::string, std::vector<std::string>, std::uint64_t, std::vector<std::string>>;
using Names = std::vector<std::string>;
using Pairs = std::vector<std::pair<std::string, std::string>>;

std::optional<Held> held_on(std::string device, Dtype dtype) {
  if (device.empty()) return std::nullopt;
  return Held{std::move(device), dtype};
}

using Slicing = std::optional<std::tuple<Extents, Extents, Extents>>;  // begin, shape, groups

std::optional<Slice> slice_of(Slicing given) {
  if (!given) return std::nullopt;
  auto& [begin, shape, groups] = *given;
  return Slice{std::move(begin), Shape(std::move(shape)), std::move(groups)};
}

void make_target(Target* self, std::string name, Extents shape, std::string_view dtype,
                 std::string_view kind, std::string tie_of, bool has_value, std::string device,
                 Slicing slice) {
  const Dtype known = dtype_argument(dtype);
  new (self) Target{.name = std::move(name),
                    .shape = Shape(std::move(shape)),
                    .dtype = known,
                    .kind = enum_argument<TargetKind>("kind", kind),
                    .tie_of = std::move(tie_of),
                    .slice = slice_of(std::move(slice)),
                    .has_value = has_value,
                    .held = held_on(std::move(device), known)};
}

nb::tuple extents_of(const Shape& shape) { return nb::tuple(nb::cast(shape.extents())); }

// Returns the name, shape and dtype of each component.
nb::tuple part_rows(const PlannedTarget& target) {
  nb::list rows;
  if (!target.quantization) return nb::tuple(rows);
  for (const auto& part : quantized_parts(*target.quantization, target.shape, target.dtype)) {
    rows.append(nb::make_tuple(part.name, extents_of(part.shape), name(part.dtype)));
  }
  return nb::tuple(rows);
}

// Returns the fields of Python's PlannedTarget, in order.
nb::tuple target_row(const Plan& plan, const PlannedTarget& target) {
  nb::list sources;
  for (const std::uint32_t source : sources_of(target.recipe, plan.decodings)) {
    sources.append(plan.catalog->tensors()[source].name);
  }
  const auto merged = merged_paths(*plan.catalog, plan.decodings, target.recipe);
  const Recipe& recipe = target.recipe;
  return nb::make_tuple(
      target.name, name(target.kind), extents_of(target.shape), name(target.dtype), target.device,
      name(target.delivery), name(recipe.origin), nb::tuple(sources), recipe.boxes.size(),
      recipe.tie_of, recipe.reason, target.byte_count(),
      target.quantization ? target.quantization->encoding : std::string(), part_rows(target),
      nb::tuple(nb::cast(merged)), nb::tuple(nb::cast(target.slice_begin)),
      nb::tuple(nb::cast(target.slice_groups)));
}

// Returns the shard and the offset of a target that is a view of the file.
std::pair<std::uint32_t, std::uint64_t> view_of(const SharedPlan& plan, std::size_t index) {
  const TensorInfo& source =
      plan->catalog->tensors()[plan->targets.at(index).recipe.boxes.at(0).source];
  return {source.shard, source.offset_begin};
}

SharedPlan plan_for(std::shared_ptr<const Catalog> catalog, std::vector<Target> targets,
                    bool values_known, const nb::kwargs& given) {
  NamedOptions named(given);
  PlanOptions options;
  const auto rules = named.take<std::string>("rules");
  if (!rules.empty()) options.rules = rules_from_json(rules);
  const auto dtype = named.take<std::string>("dtype");
  options.dtype_from_file = dtype == "auto";
  if (!dtype.empty() && !options.dtype_from_file) options.dtype = dtype_argument(dtype);
  const auto mode = named.take<std::string>("device_map_mode");
  if (!mode.empty()) options.device_map.mode = enum_argument<DeviceMapMode>("device_map", mode);
  named.take("device_map", options.device_map.entries);
  const auto bare_modules = named.take<Names>("bare_modules");
  options.device_map.bare_modules = {bare_modules.begin(), bare_modules.end()};
  named.take("allows_unknown_modules", options.device_map.allows_unknown);
  named.take("max_memory", options.max_memory);
  options.no_split_modules = named.take<std::vector<std::string>>("no_split_modules");
  named.take("offload_folder", options.offload_folder);
  const auto policy = [](const std::string& text) {
    return enum_argument<MissingPolicy>("missing", text);
  };
  named.take("missing", options.missing);
  for (auto& [pattern, text] : named.take<Pairs>("missing_patterns")) {
    options.missing_patterns.emplace_back(std::move(pattern), policy(text));
  }
  options.strip_prefixes = named.take<Names>("strip_prefixes");
  for (const auto& [target, text] : named.take<Pairs>("missing_of")) {
    options.caller.missing_of.emplace(target, policy(text));
  }
  named.take("unexpected", options.unexpected);
  named.take("staging_bytes_max", options.staging_bytes_max);
  named.take("threads", options.threads);
  named.take("local_ranks", options.local_ranks);
  named.take("allow_non_finite", options.allow_non_finite);
  named.take("mmap", options.mmap);
  if (const auto* const recipes = named.take<const Recipes*>("recipes")) options.recipes = *recipes;
  named.take("knows_all_sources", options.caller.knows_all_sources);
  named.take("known_sources", options.caller.known_sources);
  const auto expected_sources = named.take<Pairs>("expected_sources");
  options.caller.expected_sources = {expected_sources.begin(), expected_sources.end()};
  const auto explained = named.take<Names>("explained");
  options.caller.explained = {explained.begin(), explained.end()};
  named.take("missing_advice", options.caller.missing_advice);
  for (const auto& [target, encoding, dialect, block_size, nested, nested_offset, group] :
       named.take<std::vector<QuantizeRow>>("quantize")) {
    options.quantize[target] = {.encoding = encoding,
                                .dialect = dialect,
                                .block_size = block_size,
                                .nested = nested,
                                .nested_offset = nested_offset,
                                .group = group};
  }
  options.adapters = adapters_of(named.take<AdapterRows>("adapters"));
  named.take("tie", options.tie);
  named.done();
  const Skeleton skeleton = {.targets = std::move(targets), .values_known = values_known};
  const nb::gil_scoped_release release;
  return SharedPlan(make_plan(std::move(catalog), skeleton, options));
}

SharedPlan identity_plan(const std::shared_ptr<const Catalog>& catalog) {
  PlanOptions options;
  options.unexpected = UnexpectedPolicy::ignore;
  return SharedPlan(make_plan(catalog, Skeleton::from_catalog(*catalog), options));
}

// Reads a member of the plan.
template <auto member>
auto get(const SharedPlan& self) {
  return (*self).*member;
}

// Converts a dict whose keys are field names of Python's Report.
LoadFigures figures_from(const nb::dict& loaded) {
  Report report;
  visit_numbers<Report>([&](const char* name, auto member, Joined) {
    report.*member = nb::cast<std::decay_t<decltype(report.*member)>>(loaded[name]);
  });
  LoadFigures figures = figures_of(report);
  figures.process_bytes_peak = nb::cast<std::uint64_t>(loaded["process_bytes_peak"]);
  return figures;
}

std::string page_of(const SharedPlan& plan, const std::string& model,
                    const std::vector<std::pair<std::string, std::uint64_t>>& max_memory,
                    const std::map<std::string, std::uint64_t>& held,
                    const std::optional<nb::dict>& loaded) {
  PageOptions options;
  options.model = model;
  options.max_memory = max_memory;
  options.held_bytes = held;
  if (loaded) options.loaded = figures_from(*loaded);
  const nb::gil_scoped_release release;
  return to_html(*plan, options);
}

}  // namespace

void bind_target(nb::module_& module) {
  nb::class_<Target>(module, "Target")
      .def("__init__", &make_target, nb::arg("name"), nb::arg("shape"), nb::arg("dtype"),
           nb::arg("kind") = "parameter", nb::arg("tie_of") = "", nb::arg("has_value") = false,
           nb::arg("device") = "", nb::arg("slice") = nb::none())
      .def_ro("name", &Target::name)
      .def_rw("tie_of", &Target::tie_of)
      .def_prop_rw(
          "dtype", [](const Target& self) { return name(self.dtype); },
          [](Target& self, std::string_view dtype) { self.dtype = dtype_argument(dtype); })
      .def_prop_ro("kind", [](const Target& self) { return name(self.kind); })
      .def("whole", [](Target self) {
        self.slice.reset();
        return self;
      });
  module.def("skeleton_targets",
             [](std::string_view text) { return Skeleton::from_json(text).targets; });
}

void bind_words(nb::module_& module) {
  module.def("did_you_mean", &did_you_mean, nb::arg("typed"), nb::arg("known"));
  module.def("unknown_word", &unknown_word, nb::arg("what"), nb::arg("typed"), nb::arg("known"));
  module.def("unknown_dtype", [](std::string_view text) { return unknown_dtype(text); });
  module.def("unknown_device", [](std::string_view text) { return unknown_device(text); });
  module.def("shape_advice", [](const Extents& found) { return shape_advice(Shape(found)); });
  // Returns one error per layer. A row has a target, the absent names, their number and the stray
  // names.
  module.def("lacking_findings", [](const std::vector<LackingRow>& rows) {
    LackingSeries lacking;
    for (const auto& [target, absent, count, stray] : rows)
      lacking.add(target, {absent, count, stray});
    return lacking.findings();
  });
}

void bind_names(nb::module_& module) {
  // Returns, for each name, the index of the first pattern that matches the whole name, or -1.
  module.def(
      "first_matches",
      [](const std::vector<std::string>& patterns, const std::vector<std::string>& names,
         const std::string& field) {
        const NamePatterns compiled(patterns, field);
        std::vector<std::int64_t> found;
        for (const std::string& name : names) {
          const auto match = compiled.first_match(name);
          found.push_back(match ? static_cast<std::int64_t>(*match) : -1);
        }
        return found;
      },
      nb::arg("patterns"), nb::arg("names"), nb::arg("field"));
  // Returns, for each module, the index of the adapter's key that PEFT selects, or -1. Also returns
  // the total number of comparisons.
  module.def(
      "module_matches",
      [](const std::vector<std::string>& keys, const std::vector<std::string>& modules) {
        const ModulePatterns patterns({keys.begin(), keys.end()}, "format.adapter",
                                      "alpha_pattern");
        std::vector<std::int64_t> found;
        for (const std::string& module_name : modules) {
          const auto match = patterns.find(module_name);
          found.push_back(match ? static_cast<std::int64_t>(*match) : -1);
        }
        return std::pair(found, patterns.comparisons());
      },
      nb::arg("keys"), nb::arg("modules"));
  module.def("is_rules_json", &is_rules_json);
  // Returns the rules as JSON, and adds a rule for the prefix that a plan for these targets strips.
  module.def(
      "stripping_rules",
      [](const std::shared_ptr<const Catalog>& catalog, const std::vector<Target>& targets,
         const std::vector<std::string>& prefixes, const std::string& rules) {
        const Rules given = rules.empty() ? Rules() : rules_from_json(rules);
        return rules_to_json(strip_prefix(*catalog, {.targets = targets}, prefixes, given).rules);
      },
      uses_files());
}

void bind_defaults(nb::module_& module) {
  module.attr("STAGING_BYTES_MAX") = defaults::staging_bytes_max;
  module.attr("READ_AHEAD_BYTES") = defaults::read_ahead_bytes;
  module.def("mappable_memory_bytes", &mappable_memory_bytes);
  module.attr("MEMORY_UNLIMITED") = defaults::memory_unlimited;
  module.attr("GGUF_RANK_MAX") = defaults::gguf_rank_max;
  module.attr("GGUF_RANK_MOST") = defaults::gguf_rank_most;
  module.attr("STRIP_PREFIXES") = nb::tuple(nb::cast(defaults::strip_prefixes));
  nb::dict origins;
  for (const std::string& each : names_of<Origin>()) {
    const OriginRow row = origin_row(*from_name<Origin>(each));
    const bool is_written = row.given_by == GivenBy::execute || row.given_by == GivenBy::caller;
    origins[nb::str(each.c_str())] = nb::make_tuple(is_written, row.filled);
  }
  module.attr("ORIGINS") = origins;
  module.attr("MISSING_POLICIES") = nb::tuple(nb::cast(names_of<MissingPolicy>()));
}

static std::vector<Finding> findings_about_machine(const SharedPlan& plan,
                                                   std::uint64_t memory_bytes,
                                                   std::optional<std::uint64_t> limit) {
  return machine_findings(*plan, memory_bytes, limit);
}

// Returns the fields of Python's Duration, in order.
static std::tuple<std::optional<double>, bool, std::string> duration(
    const SharedPlan& plan, const std::string& rates_file) {
  const Duration found = duration_of(
      *plan, {plan->bytes_to_read, plan->bytes_to_write, plan->offload_folder}, rates_file);
  return {found.seconds, !found.excluded.empty(), found.text()};
}

void bind_plan(nb::module_& module) {
  bind_target(module);
  bind_names(module);
  bind_words(module);
  nb::class_<SharedPlan>(module, "Plan")
      .def("__len__", [](const SharedPlan& self) { return self->targets.size(); })
      .def("target", [](const SharedPlan& self,
                        std::size_t index) { return target_row(*self, self->targets.at(index)); })
      .def_prop_ro("findings", &get<&Plan::findings>)
      .def("add_findings", &SharedPlan::add_findings)
      .def("with_findings", &SharedPlan::with_findings)
      .def("machine_findings", &findings_about_machine, nb::arg(), nb::arg().none())
      .def("duration", &duration, uses_files())
      .def_prop_ro("ok", [](const SharedPlan& self) { return self->ok(); })
      .def_prop_ro("offload_folder", &get<&Plan::offload_folder>)
      .def_prop_ro("staging_bytes_max", &get<&Plan::staging_bytes_max>)
      .def_prop_ro("local_ranks", &get<&Plan::local_ranks>)
      .def_prop_ro("bytes_to_read", &get<&Plan::bytes_to_read>)
      .def_prop_ro("bytes_to_write", &get<&Plan::bytes_to_write>)
      .def_prop_ro("peak_bytes", &get<&Plan::peak_bytes>)
      .def_prop_ro("device_map", &get<&Plan::device_map>)
      .def("view_of", &view_of)
      .def("require_ok", [](const SharedPlan& self) { require_ok(*self); })
      .def("to_json", [](const SharedPlan& self) { return to_json(*self); })
      .def("to_table", [](const SharedPlan& self) { return to_table(*self); })
      .def("to_html", &page_of, nb::arg("model"), nb::arg("max_memory"), nb::arg("held"),
           nb::arg("loaded").none());
  bind_defaults(module);
  module.attr("DEVICE_MAP_MODES") = nb::tuple(nb::cast(names_of<DeviceMapMode>()));
  module.attr("COUNTED_DEVICES") = nb::tuple(nb::cast(counted_devices));
  module.def(
      "is_accelerator", [](std::string_view device) { return is_accelerator(device); },
      nb::arg("device"));
  module.def("make_plan", &plan_for, nb::arg("catalog"), nb::arg("targets"),
             nb::arg("values_known"), nb::arg("options"));
  module.def(
      "plan_from_json",
      [](std::string_view text, bool allow_links, const std::string& root,
         const std::string& plan_folder, const std::string& offload_folder,
         const std::vector<std::string>& other_roots, bool allow_remote, Storage* storage) {
        return SharedPlan(plan_from_json(text, {.allow_links = allow_links, .storage = storage},
                                         {.root = root,
                                          .other_roots = other_roots,
                                          .plan_folder = plan_folder,
                                          .offload_folder = offload_folder,
                                          .allow_remote = allow_remote}));
      },
      nb::arg("text"), nb::arg("allow_links") = false, nb::arg("root") = "",
      nb::arg("plan_folder") = "", nb::arg("offload_folder") = "",
      nb::arg("other_roots") = std::vector<std::string>(), nb::arg("allow_remote") = false,
      nb::arg("storage").none() = nb::none(), uses_files());
  module.def(
      "check_series",
      [](const std::vector<std::vector<std::string>>& partners, std::uint64_t count) {
        std::vector<SeriesMember> members;
        for (std::uint32_t i = 0; i < partners.size(); ++i) {
          for (const std::string& number : partners[i]) members.push_back({i, number});
        }
        const auto check =
            check_series(members, static_cast<std::uint32_t>(partners.size()), {.count = count});
        std::vector<std::pair<std::uint32_t, std::uint64_t>> absent;
        for (const SeriesGap& gap : check.absent) absent.emplace_back(gap.partner, gap.number);
        return std::tuple(absent, check.absent_count, check.stray);
      },
      nb::arg("partners"), nb::arg("count") = 0);
  module.def("identity_plan", &identity_plan, uses_files());
}

}  // namespace loadstone::python
