#include "loadstone/convert.h"

#include "base/refuse_option.h"
#include "bindings.h"
#include "named_options.h"
#include "observer.h"

namespace loadstone::python {

namespace {

template <typename Enum>
Enum require_known(const char* field, const char* what, std::string_view text) {
  if (const auto known = from_name<Enum>(text)) return *known;
  throw Error("plan.options", unknown_word(what, text, names_of<Enum>()), {.field = field});
}

MergeOptions merge_options(const std::vector<float>& weights, const AdapterRows& adapters,
                           std::string_view method, std::optional<bool> normalise,
                           std::optional<float> scale, std::optional<double> density,
                           std::optional<std::uint64_t> seed, std::string_view tie) {
  return {.weights = weights,
          .adapters = adapters_of(adapters),
          .tie = enum_argument<TiePolicy>("tie", tie),
          .method = require_known<MergeMethod>("method", "method", method),
          .normalise = normalise,
          .scale = scale,
          .density = density,
          .seed = seed};
}

QuantizeOptions quantize_options(NamedOptions& named, FileFormat format) {
  QuantizeOptions options;
  auto mode = named.take<std::string>("mode");
  if (mode.empty()) mode = name(QuantizeMode::exact);
  const auto written = require_known<QuantizeMode>("mode", "mode", mode);
  for (const auto& [pattern, encoding] :
       named.take<std::vector<std::pair<std::string, std::string>>>("formats")) {
    options.formats.push_back(
        {.pattern = pattern, .quantization = parse_quantization(encoding, written, format)});
  }
  if (options.formats.empty() && written != QuantizeMode::exact) {
    throw Error("plan.options", "mode specifies how to quantize, but quantize was not passed",
                {.field = "mode"});
  }
  named.take("include", options.include);
  named.take("exclude", options.exclude);
  named.take("style", options.style);
  named.take("allow_non_finite", options.allow_non_finite);
  return options;
}

Conversion conversion_for(std::shared_ptr<const Catalog> catalog, const nb::kwargs& given) {
  NamedOptions named(given);
  ConvertOptions options;
  named.take("format", options.format);
  const auto rules = named.take<std::string>("rules");
  if (!rules.empty()) options.rules = rules_from_json(rules);
  if (const auto* const recipes = named.take<const Recipes*>("recipes")) options.recipes = *recipes;
  named.take("dtype", options.dtype);
  named.take("block_dtype", options.block_dtype);
  named.take("dequantize", options.dequantize);
  named.take("require_lossless", options.require_lossless);
  const auto experts = named.take<std::string>("experts");
  if (!experts.empty()) {
    options.experts = require_known<ExpertLayout>("experts", "layout", experts);
  }
  options.quantize = quantize_options(named, options.format);
  const auto metadata = named.take<std::string>("metadata");
  if (!metadata.empty()) options.metadata = metadata_from_json(metadata);
  named.take("beyond_ggml", options.beyond_ggml);
  if (const auto* const merge = named.take<const MergeOptions*>("merge")) options.merge = *merge;
  named.take("unexpected", options.unexpected);
  named.take("one_file", options.one_file);
  named.take("is_split", options.is_split);
  named.take("stem", options.stem);
  const auto shard_bytes_max = named.take<std::optional<std::uint64_t>>("shard_bytes_max");
  if (shard_bytes_max) options.shard_bytes_max = *shard_bytes_max;
  named.take("memory_bytes_max", options.memory_bytes_max);
  named.take("threads", options.threads);
  const auto folder = named.take<std::string>("folder");
  const auto copy_code = named.take<bool>("copy_code");
  const auto imatrix = named.take<std::string>("imatrix");
  named.done();
  const nb::gil_scoped_release release;
  // Runs without the GIL, because a remote folder may be slow.
  if (!folder.empty()) {
    options.folder = options.one_file || options.is_split
                         ? folders_left_out(folder)
                         : read_model_folder(*catalog, folder, copy_code);
  }
  if (!imatrix.empty()) {
    options.quantize.importance =
        std::make_shared<const ImportanceMatrix>(open_importance_matrix(imatrix));
  }
  return make_conversion(std::move(catalog), options);
}

ConvertRun run_for(bool resume, std::optional<std::pair<std::uint32_t, std::uint32_t>> part,
                   bool finish, bool overwrite, const std::string& receipt,
                   std::string_view page_cache) {
  ConvertRun run = {.resume = resume, .part = {}, .finish = finish, .overwrite = overwrite};
  if (!receipt.empty()) run.receipt = digest_kind(receipt);
  const auto choice = parse_page_cache(page_cache);
  if (!choice) {
    refuse_option("page_cache", "this is not a choice for the page cache", std::string(page_cache),
                  "auto, keep or release");
  }
  run.page_cache = *choice;
  if (part) run.part = ConvertPart{.index = part->first, .count = part->second};
  return run;
}

ConvertReport run(const Conversion& conversion, const std::string& target, nb::object callback,
                  ConvertRun run) {
  PythonObserver observer(std::move(callback));
  const auto storage = observer.storage_for(*conversion.plan.catalog);
  return observer.watch([&] {
    run.observer = &observer;
    run.storage = storage.get();
    return convert(conversion, target, run);
  });
}

// Returns for each file the size of its data, and for each of its tensors the name, the shape, the
// encoding, and the begin and end in the data.
nb::list file_rows(const Conversion& conversion) {
  nb::list rows;
  for (const OutputFile& file : conversion.files) {
    nb::list tensors;
    for (const OutputTensor& each : file.tensors) {
      tensors.append(nb::make_tuple(each.name, nb::tuple(nb::cast(each.shape.extents())),
                                    each.encoding.name(), each.begin, each.end));
    }
    rows.append(nb::make_tuple(file.data_bytes, tensors));
  }
  return rows;
}

// Returns for each encoding its name, and the numbers of tensors, blocks and exact blocks, and the
// largest error.
nb::list requantized_rows(const ConvertReport& report) {
  nb::list rows;
  for (const auto& [encoding, tensors, loss] : report.requantized) {
    rows.append(
        nb::make_tuple(encoding, tensors, loss.blocks, loss.exact_blocks, loss.largest_error));
  }
  return rows;
}

// Returns the text of a companion file that the conversion generates, such as config.json.
std::optional<std::string> extra_text(const Conversion& conversion, std::string_view wanted) {
  for (const ExtraFile& extra : conversion.extras) {
    if (extra.name == wanted && extra.copy_of.empty()) return extra.text;
  }
  return std::nullopt;
}

std::uint64_t in_memory(const Conversion& conversion, std::uint32_t file, std::uintptr_t address,
                        std::size_t bytes) {
  PythonObserver observer{nb::none()};
  const auto storage = observer.storage_for(*conversion.plan.catalog);
  // The caller's buffer, which must be as large as the tensor.
  auto* const data = reinterpret_cast<std::byte*>(address);  // NOLINT
  return observer.watch([&] {
    return convert_in_memory(conversion, file, {data, bytes}, &observer, storage.get());
  });
}

// Returns the bytes to read and to write.
std::pair<std::uint64_t, std::uint64_t> work_left_of(const Conversion& self,
                                                     const std::string& target,
                                                     const ConvertRun& run,
                                                     const std::vector<Finding>& findings) {
  const WorkLeft left = work_left(self, target, run, findings);
  return {left.bytes_to_read, left.bytes_to_write};
}

}  // namespace

void bind_convert(nb::module_& module) {
  nb::class_<Conversion>(module, "Conversion")
      .def_prop_ro("findings", [](const Conversion& self) { return self.plan.findings; })
      .def_prop_ro("ok", &Conversion::ok)
      .def_prop_ro("threads", [](const Conversion& self) { return self.budget.threads; })
      .def_ro("bytes_to_read", &Conversion::bytes_to_read)
      .def_ro("bytes_to_write", &Conversion::bytes_to_write)
      .def_ro("peak_bytes", &Conversion::peak_bytes)
      .def("require_ok", [](const Conversion& self) { require_ok(self.plan); })
      .def_prop_ro("file_count", [](const Conversion& self) { return self.files.size(); })
      .def(
          "check_target",
          [](const Conversion& self, const std::string& target, const ConvertRun& run) {
            return check_target(self, target, run);
          },
          nb::arg("target"), nb::arg("run"), uses_files())
      .def("work_left", &work_left_of, nb::arg("target"), nb::arg("run"), nb::arg("findings"),
           uses_files())
      .def_prop_ro("files", &file_rows)
      .def("extra_text", &extra_text, nb::arg("name"))
      .def("to_json", [](const Conversion& self) { return to_json(self); })
      .def(
          "to_table", [](const Conversion& self, bool tensors) { return to_table(self, tensors); },
          nb::arg("tensors") = false);
  nb::class_<ConvertReport>(module, "ConvertReport")
      .def_ro("outputs", &ConvertReport::outputs)
      .def_ro("findings", &ConvertReport::findings)
      .def("numbers", &numbers_of<ConvertReport>)
      .def_prop_ro("requantized", &requantized_rows)
      .def_prop_ro("requantized_text",
                   [](const ConvertReport& self) { return to_text(self.requantized); })
      .def_prop_ro("page_cache", [](const ConvertReport& self) { return name(self.page_cache); })
      .def("to_json", [](const ConvertReport& self) { return to_json(self); });
  nb::list sums;
  visit_numbers<ConvertReport>([&](const char* name, auto, Joined how) {
    if (how == Joined::sum) sums.append(name);
  });
  module.attr("CONVERT_SUMS") = nb::tuple(sums);
  nb::class_<MergeOptions>(module, "MergeOptions");
  module.def("merge_options", &merge_options, nb::arg("weights"), nb::arg("adapters"),
             nb::arg("method"), nb::arg("normalise").none(), nb::arg("scale").none(),
             nb::arg("density").none(), nb::arg("seed").none(), nb::arg("tie") = "split");
  module.def("make_conversion", &conversion_for, nb::arg("catalog"), nb::arg("options"));
  module.def("convert_in_memory", &in_memory, nb::arg("conversion"), nb::arg("file"),
             nb::arg("address"), nb::arg("bytes"));
  module.def(
      "format_of_target",
      [](std::string_view target) -> std::optional<std::string> {
        const auto format = format_of_target(target);
        return format ? std::optional(std::string(name(*format))) : std::nullopt;
      },
      nb::arg("target"));
  nb::class_<ConvertRun>(module, "ConvertRun")
      .def(
          "__init__",
          [](ConvertRun* self, bool resume,
             std::optional<std::pair<std::uint32_t, std::uint32_t>> part, bool finish,
             bool overwrite, const std::string& receipt, std::string_view page_cache) {
            new (self) ConvertRun(run_for(resume, part, finish, overwrite, receipt, page_cache));
          },
          nb::arg("resume") = false, nb::arg("part").none() = nb::none(), nb::arg("finish") = false,
          nb::arg("overwrite") = false, nb::arg("receipt") = "", nb::arg("page_cache") = "auto");
  module.def("convert", &run, nb::arg("conversion"), nb::arg("target"), nb::arg("progress").none(),
             nb::arg("run"));
}

}  // namespace loadstone::python
