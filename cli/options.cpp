#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "base/json_fields.h"
#include "base/named.h"
#include "base/text.h"
#include "cli/output.h"
#include "formats/document.h"
#include "loadstone/device.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/machine.h"
#include "loadstone/receipt.h"
#include "loadstone/remote.h"
#include "plan/devices.h"
#include "plan/origins.h"
#include "plan/rules.h"
#include "tensor/unknown_dtype.h"

namespace loadstone::cli {

namespace {

constexpr std::size_t map_bytes_max = 64u << 20;
constexpr std::string_view size_forms =
    "bytes (4096) or with a unit: 8GiB (KiB, MiB, GiB, TiB) or 500MB (kB, MB, GB, TB)";

[[noreturn]] void refuse_value(std::string_view option, std::string_view text,
                               std::string_view expected) {
  throw Error("usage", fmt::format("{}: '{}' is not {}", option, printable(text), expected));
}

// Parses "DEVICE=SIZE". Device names contain no '=', so the first one ends the name.
std::pair<std::string, std::uint64_t> parse_limit(const std::string& text) {
  const auto equals = text.find('=');
  const std::string size = equals == std::string::npos ? "" : text.substr(equals + 1);
  std::uint64_t bytes = defaults::memory_unlimited;
  if (equals == 0 || (size != "unlimited" && !parse_bytes(size, bytes))) {
    refuse_value("--max-memory", text,
                 fmt::format("a limit; write DEVICE=SIZE, such as cpu=8GiB or cpu=unlimited, with "
                             "SIZE as {}",
                             size_forms));
  }
  return {text.substr(0, equals), bytes};
}

// Returns true if a value of --device-map is a path, provided that it is not a known word.
bool is_path(const std::string& text) {
  std::error_code problem;
  return text.find('/') != std::string::npos || text.ends_with(".json") ||
         std::filesystem::exists(text, problem);
}

DeviceMap map_from_json(std::string_view text) {
  const JsonDocument document(text, "usage", map_bytes_max);
  const JsonReader reader("usage");
  const JsonPlace place{.key = "--device-map"};
  simdjson::dom::object object;
  if (document.root().get(object) != simdjson::SUCCESS) {
    reader.refuse(place, "not an object of modules and their devices");
  }
  DeviceMap map;
  for (const auto [module, device] : object) {
    map.entries.emplace_back(module, reader.string(device, {.parent = &place, .key = module}));
  }
  return map;
}

DeviceMap map_from_list(std::string_view text) {
  DeviceMap map;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const std::string_view entry = text.substr(0, comma);
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
    const auto equals = entry.find('=');
    if (equals == std::string_view::npos || equals + 1 == entry.size()) {
      refuse_value("--device-map", entry,
                   "an entry; write MODULE=DEVICE, and =DEVICE for all other modules");
    }
    map.entries.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return map;
}

using MemoryLimits = std::vector<std::pair<std::string, std::uint64_t>>;

bool limits_host(const MemoryLimits& limits) {
  return std::ranges::count(limits, "cpu", &MemoryLimits::value_type::first) > 0;
}

// Adds the free memory of this machine, less a reserve, as the capacity of "cpu", unless the user
// gave one.
void add_host_capacity(PlanOptions& options) {
  auto& limits = options.max_memory;
  const auto named = [&](std::string_view device) {
    return std::ranges::find(limits, device, &MemoryLimits::value_type::first);
  };
  if (limits_host(limits)) return;
  if (const auto bytes = mappable_memory_bytes()) limits.insert(named("disk"), {"cpu", *bytes});
}

MemoryLimits memory_limits(const PlanArgs& args) {
  MemoryLimits limits;
  for (const auto& text : args.max_memory) limits.push_back(parse_limit(text));
  return limits;
}

PlanOptions plan_options(const PlanArgs& args) {
  PlanOptions options = args.options;
  if (!args.strip_prefixes.empty()) options.strip_prefixes = args.strip_prefixes;
  if (args.dtype == "auto") {
    options.dtype_from_file = true;
  } else if (!args.dtype.empty()) {
    options.dtype = dtype_option("--dtype", args.dtype, {"auto"});
  }
  if (!args.device_map.empty()) options.device_map = parse_device_map(args.device_map);
  options.max_memory = memory_limits(args);
  if (options.device_map.mode) add_host_capacity(options);
  if (!args.staging.empty()) {
    options.staging_bytes_max = parse_size("--staging", args.staging, 1);
  }
  return options;
}

}  // namespace

std::uint64_t parse_size(std::string_view option, const std::string& text, std::uint64_t least) {
  std::uint64_t bytes = 0;
  if (!parse_bytes(text, bytes)) {
    refuse_value(option, text, fmt::format("a size; write {}", size_forms));
  }
  if (bytes >= least) return bytes;
  throw Error("usage", fmt::format("{}: {} is too small; write a size such as 8GiB or 500MB",
                                   option, printable(text)));
}

Dtype dtype_option(std::string_view option, const std::string& text,
                   std::vector<std::string> others) {
  if (const auto dtype = parse_dtype(text)) return *dtype;
  throw Error("usage", fmt::format("{}: {}", option, unknown_dtype(text, std::move(others))));
}

OpenOptions OpenArgs::options() const {
  OpenOptions options;
  options.allow_links = allow_links;
  options.gguf_rank_max = gguf_rank_max;
  options.storage = &reading_storage(remote);
  return options;
}

Option add_checkpoint(Command command, OpenArgs& args) {
  return command.add_option(
      "CHECKPOINT", args.paths, "",
      "A file, a folder, an index, a pattern in quotes, or all files of a checkpoint;\n"
      "https://, hf://ORG/NAME[@REVISION][/FILE] and s3://BUCKET/KEY too");
}

void add_open_options(Command command, OpenArgs& args) {
  command.add_flag("--allow-links", args.allow_links,
                   "Follow links that leave the checkpoint's folder");
  command
      .add_option(
          "--gguf-rank-max", args.gguf_rank_max, "N",
          "Maximum number of dimensions of a GGUF tensor; video models may have 5 (default: " +
              std::to_string(args.gguf_rank_max) + ")")
      .in_range(1u, defaults::gguf_rank_most, fmt::format("1-{}", defaults::gguf_rank_most));
  command.add_option(
      "--ca-file", args.remote.ca_file, "FILE",
      "Trusted certificate authorities, a PEM file (default: SSL_CERT_FILE, the system's)");
  command.add_option("--proxy", args.remote.proxy, "URL",
                     "Proxy for other machines (default: HTTPS_PROXY, ALL_PROXY)");
  command.add_flag("--strict", args.strict, "Treat warnings as errors (exit status 3)");
}

std::shared_ptr<const Catalog> open_paths(const OpenArgs& args) {
  return args.paths.size() == 1 ? open_checkpoint(args.paths.front(), args.options())
                                : open_checkpoint(args.paths, args.options());
}

Weighted parse_weighted(const std::string& text) {
  std::error_code problem;
  const auto colon = text.rfind(':');
  if (colon == std::string::npos || std::filesystem::exists(text, problem)) return {text};
  float weight = 0;
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data() + colon + 1, end, weight);
  if (after != end || error == std::errc::invalid_argument) return {text};
  if (error == std::errc::result_out_of_range) weight = std::numeric_limits<float>::infinity();
  if (!std::isfinite(weight)) {
    throw Error("usage", fmt::format("'{}': a weight must be a finite number in the range of F32",
                                     printable(text)));
  }
  return {text.substr(0, colon), weight};
}

std::vector<MergeAdapter> AdapterArgs::open(
    const OpenArgs& how, std::vector<std::shared_ptr<const Catalog>>& checkpoints) const {
  if (!ignore.empty() && adapters.empty()) {
    throw Error("usage", "--lora-ignore needs --lora");
  }
  std::vector<MergeAdapter> opened;
  for (const std::string& text : adapters) {
    const auto [path, factor] = parse_weighted(text);
    checkpoints.push_back(open_checkpoint(path, how.options()));
    opened.push_back({.factor = factor, .ignore = ignore});
  }
  return opened;
}

void add_adapter_options(Command command, AdapterArgs& args) {
  command.add_option("--lora", args.adapters, "ADAPTER",
                     "An adapter, with a factor for its change: a:0.8; repeatable");
  command.add_option("--lora-ignore", args.ignore, "PATTERN",
                     "Pattern for tensors of adapters to exclude; repeatable");
  command.add_choice("--tie", args.tie, "P",
                     "Other names of a tied tensor that an adapter changes: split (default):\n"
                     "they keep the base's value; keep: they change with it");
}

Command add_plan_options(Command command, PlanArgs& args) {
  const Command plan = command.in_group("The plan");
  const Option skeleton = plan.add_option(
      "--skeleton", args.skeleton_path, "FILE",
      "Skeleton: the tensors that the model needs, as JSON (default: the checkpoint's)");
  plan.add_option("--rules", args.rules_path, "FILE", rules_help).needs(skeleton);
  plan.add_option("--strip-prefix", args.strip_prefixes, "P",
                  "Prefix to remove if all names have it; repeatable" +
                      default_text(fmt::format("{}", fmt::join(defaults::strip_prefixes, " and "))))
      .needs(skeleton);
  plan.add_option("--dtype", args.dtype, "T",
                  "Cast parameters to this dtype; auto: keep the file's");
  plan.add_option("--device-map", args.device_map, "M",
                  either(names_of<DeviceMapMode>()) + "; MODULE=DEVICE,...;\na JSON file");
  plan.add_option(
      "--max-memory", args.max_memory, "D=SIZE",
      "Memory limit of a device: cpu=8GiB, cuda:0=500MB or cpu=4096 (bytes); repeatable."
      "\nWithout one for cpu, a plan must fit the free memory of this machine;\n"
      "cpu=unlimited allows any size");
  plan.add_option("--offload-folder", args.options.offload_folder, "DIR",
                  "Folder for the tensors that are placed on disk");
  plan.add_choice("--missing", args.options.missing, "P",
                  "What to do with tensors that the checkpoint lacks",
                  names_of<MissingPolicy>(
                      [](MissingPolicy policy) { return !missing_row(policy).needs_model; }));
  plan.add_choice("--unexpected", args.options.unexpected, "P",
                  "What to do with tensors that the model does not need");
  plan.add_option("--staging", args.staging, "SIZE",
                  "Memory for bytes that are read but not yet in place" +
                      default_text(exact_bytes(defaults::staging_bytes_max)));
  plan.add_flag("--allow-non-finite", args.options.allow_non_finite,
                "Continue if merged or quantized values are NaN or infinite");
  add_adapter_options(plan, args.lora);
  return plan;
}

RulesOrRecipes read_rules(const std::string& path, const Catalog& catalog) {
  return parse_file(path, [&](const std::string& text) {
    RulesOrRecipes given;
    if (is_rules_json(text)) {
      given.rules = rules_from_json(text);
    } else {
      given.recipes = recipes_from_json(catalog, text);
    }
    return given;
  });
}

Plan make_plan(const PlanArgs& args) {
  PlanOptions options = plan_options(args);
  if (args.skeleton_path == "-" && args.rules_path == "-") standard_input_is_taken();
  const bool has_skeleton = !args.skeleton_path.empty();
  Skeleton skeleton;
  if (has_skeleton) skeleton = parse_file(args.skeleton_path, Skeleton::from_json);
  std::vector<std::shared_ptr<const Catalog>> checkpoints = {open_paths(args.open)};
  options.adapters = args.lora.open(args.open, checkpoints);
  options.tie = args.lora.tie;
  auto catalog = checkpoints.front();
  if (checkpoints.size() > 1) catalog = std::make_shared<const Catalog>(std::move(checkpoints));
  if (!has_skeleton) skeleton = Skeleton::from_catalog(*catalog);
  if (!args.rules_path.empty()) {
    RulesOrRecipes given = read_rules(args.rules_path, *catalog);
    options.rules = std::move(given.rules);
    options.recipes = std::move(given.recipes);
  }
  return make_plan(catalog, skeleton, options);
}

// loadstone cannot ask for devices other than CUDA's.
static void warn_of_absent_devices(Plan& plan) {
  std::set<std::string> devices;
  for (const PlannedTarget& target : plan.targets) devices.insert(target.device);
  std::vector<std::string> absent;
  std::ranges::copy_if(devices, std::back_inserter(absent), [](const std::string& device) {
    return device.starts_with("cuda") && !has_cuda(device);
  });
  if (absent.empty()) return;
  plan.findings.push_back(
      {.severity = Severity::warning,
       .code = "plan.device_absent",
       .sources = absent,
       .message = fmt::format("this machine does not have {}, on which the plan places tensors",
                              name_list(absent)),
       .suggestion = "if the plan is not for a different machine, choose other devices"});
}

void compare_with_machine(Plan& plan, const PlanArgs& args, bool is_saved) {
  const MemoryLimits limits = memory_limits(args);
  std::optional<std::uint64_t> limit;
  if (!is_saved && (from_name<DeviceMapMode>(args.device_map) || limits_host(limits))) {
    limit = defaults::memory_unlimited;
  }
  for (const auto& [device, bytes] : is_saved ? limits : MemoryLimits()) {
    if (device != "cpu") throw Error("usage", "--max-memory with --plan is for cpu only");
    limit = bytes;
  }
  const auto needed = plan.peak_bytes.find("cpu");
  std::ranges::move(
      machine_findings(plan, needed == plan.peak_bytes.end() ? 0 : needed->second, limit),
      std::back_inserter(plan.findings));
  warn_of_absent_devices(plan);
  sort_findings(plan.findings);
}

void write_page(const Plan& plan, const PlanArgs& args, const std::optional<LoadFigures>& loaded) {
  if (args.html_path.empty()) return;
  PageOptions options;
  options.max_memory = memory_limits(args);
  std::erase_if(options.max_memory,
                [](const auto& limit) { return limit.second == defaults::memory_unlimited; });
  options.loaded = loaded;
  write_document(args.html_path, to_html(plan, options));
}

void add_json_flag(Command command, bool& json) {
  command.add_flag("--json", json, "One JSON document on stdout, and nothing else there");
}

static void add_threads(Command command, unsigned& threads, const std::string& help) {
  command.add_option("--threads", threads, "N", help)
      .in_range(0u, defaults::threads_most, fmt::format("0-{}", defaults::threads_most));
}

void add_threads_option(Command command, unsigned& threads, const std::string& help,
                        unsigned most) {
  add_threads(command, threads, help + default_text(fmt::format("one per core, at most {}", most)));
}

void add_readers_option(Command command, unsigned& threads, const std::string& help) {
  add_threads(command, threads,
              help + default_text(fmt::format("one per core, from {} to {};\na load begins with "
                                              "fewer, and adds readers while this helps",
                                              defaults::first_readers_max, defaults::threads_max)));
}

void add_receipt_option(Command command, std::string& kind, const std::string& help) {
  command
      .add_option("--receipt", kind, "KIND",
                  help + "xxh3-128 detects accidental changes, sha256-tree also tampering")
      .one_of(names_of<DigestKind>());
}

void add_html_option(Command command, std::string& path) {
  command.add_option("--html", path, "FILE", "Also write the plan as an HTML page");
}

DeviceMap parse_device_map(const std::string& text) {
  DeviceMap map;
  map.mode = from_name<DeviceMapMode>(text);
  if (map.mode) return map;
  if (is_device_name(device_name(text))) {
    map.entries.emplace_back("", text);
    return map;
  }
  if (text.starts_with('{')) return map_from_json(text);
  if (!is_remote(text) && text.find('=') != std::string::npos) return map_from_list(text);
  if (is_remote(text) || is_path(text)) return parse_file(text, map_from_json);
  throw Error("usage", "--device-map: " + unknown_device(text, names_of<DeviceMapMode>()));
}

}  // namespace loadstone::cli
