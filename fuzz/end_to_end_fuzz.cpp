// Runs everything through the public interface: opens a checkpoint of any format, plans, saves the
// plan, changes it, reads it back and executes it; then converts the checkpoint, verifies the
// output and converts it back. Only loadstone::Error may be thrown, and accepted input must give
// complete results: every target has an origin, a saved plan equals the original, and the output of
// a conversion without changes equals its source.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "fuzz/checkpoint_input.h"
#include "fuzz/mutate.h"
#include "fuzz/require.h"
#include "fuzz/skeleton_input.h"
#include "loadstone/audit.h"
#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/page.h"
#include "loadstone/plan.h"
#include "loadstone/verify.h"
#include "support/files.h"

namespace loadstone::fuzz {

namespace {

// Limit on the memory and disk space of a run. Larger plans are not executed.
constexpr std::uint64_t bytes_max = 8 << 20;

// Returns the target folder of conversions and offloads, which is emptied for each input.
const std::filesystem::path& work_folder() {
  static const test::TemporaryFolder folder;
  return folder.path();
}

struct Run {
  Input& input;
  std::string path;  // path of the checkpoint
  test::MemoryStorage storage;
  std::shared_ptr<const Catalog> catalog;
};

bool is_small(const Plan& plan) {
  std::uint64_t bytes = plan.staging_bytes_max;
  for (const auto& [device, peak] : plan.peak_bytes) {
    if (peak > bytes_max) return false;
    bytes += peak;
  }
  return bytes <= 4 * bytes_max && plan.bytes_to_write <= bytes_max;
}

void show(const Plan& plan) {
  require(!to_table(plan).empty());
  require(!to_html(plan).empty());
}

void carry_out(Run& run, const Plan& plan) {
  if (!is_small(plan)) return;
  // A plan must only write to the caller's folders.
  require(plan.offload_folder.empty() || plan.offload_folder == work_folder() / "offload");
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations(),
                                {.threads = static_cast<unsigned>(run.input.below(4)),
                                 .chunk_bytes = std::uint64_t{1} << run.input.below(23),
                                 .storage = &run.storage});
  require(plan.ok());
  require(report.provenance.size() == plan.targets.size());
  require(!to_json(report).empty());
  const Audit result = audit(plan, report);
  require(result.unaccounted.empty());
  (void)result.text();
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.delivery != Delivery::memory || target.recipe.origin != Origin::checkpoint) continue;
    require(report.provenance[i].bytes_written == target.byte_count());
    require(!report.provenance[i].sources.empty());
  }
}

// Reads the text as a plan and executes it. Returns false if loadstone rejects the plan.
bool read_and_carry_out(Run& run, const std::string& text) {
  try {
    const PlanPaths paths = {.root = run.path, .offload_folder = work_folder() / "offload"};
    const Plan plan = plan_from_json(text, {.storage = &run.storage}, paths);
    show(plan);
    carry_out(run, plan);
  } catch (const Error&) {
    return false;
  }
  return true;
}

void plan_and_execute(Run& run) {
  const Skeleton skeleton = skeleton_for(*run.catalog, run.input);
  const PlanOptions options =
      plan_options_for(run.catalog, skeleton, run.input, work_folder() / "offload");
  const Plan plan = make_plan(run.catalog, skeleton, options);
  show(plan);
  const std::string text = to_json(plan);
  const PlanPaths same = {.root = run.path, .offload_folder = plan.offload_folder};
  require(to_json(plan_from_json(text, {.storage = &run.storage}, same)) == text);
  try {
    carry_out(run, plan);
  } catch (const Error&) {
    // The value is out of range, or loadstone does not support the request.
  }
  (void)read_and_carry_out(run, mutated_json(text, run.input, 4));
}

std::uint64_t output_bytes(const Conversion& conversion) {
  std::uint64_t bytes = 0;
  for (const OutputFile& file : conversion.files) {
    if (file.byte_count() > bytes_max) return UINT64_MAX;
    bytes += file.byte_count();
  }
  return bytes;
}

bool keeps_everything(const Catalog& catalog, const ConvertOptions& options) {
  for (const TensorInfo& tensor : catalog.tensors()) {
    if (!tensor.encoding.is_dtype()) return false;  // a conversion decodes blocks
  }
  return options.rules.empty() && options.recipes.targets.empty() && !options.dtype &&
         !options.dequantize && options.experts == ExpertLayout::keep &&
         options.quantize.formats.empty();
}

// Converts and returns the catalog of the output, or null if the conversion is rejected.
std::shared_ptr<const Catalog> convert_to(const std::shared_ptr<const Catalog>& catalog, Run& run,
                                          Storage* storage, const std::string& name) {
  ConvertOptions options = convert_options_for(catalog, run.input);
  const bool is_gguf = options.format == FileFormat::gguf;
  if (options.is_split) options.stem = name;
  const std::string target = work_folder() / (is_gguf            ? name + ".gguf"
                                              : options.one_file ? name + ".safetensors"
                                                                 : name);
  try {
    const Conversion conversion = make_conversion(catalog, options);
    require(!to_table(conversion, true).empty() && !to_json(conversion).empty());
    if (output_bytes(conversion) > bytes_max || conversion.peak_bytes > 16 * bytes_max) return {};
    const ConvertRun how = {.resume = run.input.chance(20), .part = {}, .storage = storage};
    const ConvertReport report = convert(conversion, target, how);
    require(conversion.ok());
    require(!to_json(report).empty());
    auto made = open_checkpoint(is_gguf ? report.outputs.front() : target, {.gguf_rank_max = 8});
    if (keeps_everything(*catalog, options)) {
      require(made->tensors().size() == catalog->tensors().size());
    }
    return made;
  } catch (const Error&) {
    require(!std::filesystem::exists(target));
    return {};
  }
}

void convert_and_verify(Run& run) {
  const VerifyOptions options = {.storage = &run.storage,
                                 .threads = static_cast<unsigned>(run.input.below(3))};
  require(!to_json(verify_values(*run.catalog, options)).empty());
  require(compare(*run.catalog, *run.catalog, options).differences.empty());
  const auto first = convert_to(run.catalog, run, &run.storage, "first");
  if (first == nullptr) return;
  require(!to_table(verify_values(*first)).empty());
  if (const auto second = convert_to(first, run, nullptr, "second")) {
    require(!to_table(compare(*first, *second)).empty());
  }
}

void run_all(Input& input) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(work_folder())) {
    std::filesystem::remove_all(entry.path(), ignored);
  }
  Run run = {.input = input, .path = {}, .storage = {}, .catalog = {}};
  const bool converts = input.chance(50);
  run.path = add_checkpoint(input, run.storage);
  run.catalog = open_checkpoint(run.path, {.storage = &run.storage});
  require(!to_json(*run.catalog).empty() && !to_table(*run.catalog, true).empty());
  if (converts) {
    convert_and_verify(run);
  } else {
    plan_and_execute(run);
  }
}

}  // namespace

}  // namespace loadstone::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return loadstone::fuzz::run_input({data, size}, loadstone::fuzz::run_all, [](const auto& error) {
    return loadstone::find_code(error.code()) != nullptr && error.code() != "internal";
  });
}
