// What a conversion will do: tensors, their places in files, and what it takes.
#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/text.h"
#include "convert/header.h"
#include "convert/outputs.h"
#include "convert/windows.h"
#include "loadstone/convert.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr unsigned threads_default_max = 4;
// Of window and staging: more threads are not worth less, and one cannot do with less.
constexpr std::uint64_t thread_bytes_wanted = 1 << 20;
constexpr std::uint64_t thread_bytes_least = 64 << 10;
constexpr std::uint64_t thread_bytes_most = 32 << 20;
constexpr std::uint64_t page_bytes = 4096;
// What a thread takes beside that: its stack, and what the allocator keeps for it.
constexpr std::uint64_t thread_overhead = 256 << 10;
constexpr std::uint64_t header_bytes_max = 100'000'000;  // the format's own limit

[[noreturn]] void refuse(const char* field, std::string message, std::string found = {}) {
  throw Error("plan.options", std::move(message), {.field = field, .found = std::move(found)});
}

void check_options(const ConvertOptions& options) {
  const auto is_float = [](Dtype dtype) {
    return kind(dtype) == DtypeKind::floating && bits(dtype) % 8 == 0;
  };
  if (options.dtype && !is_float(*options.dtype)) {
    refuse("dtype", "tensors can only get a floating dtype of whole bytes",
           std::string(name(*options.dtype)));
  }
  const Dtype block = options.block_dtype;
  if (block != Dtype::f32 && block != Dtype::bf16 && block != Dtype::f16) {
    refuse("block_dtype", "blocks become F32, BF16 or F16", std::string(name(block)));
  }
  if (options.stem.empty() ||
      options.stem.find_first_of(std::string_view("/\0", 2)) != std::string::npos ||
      options.stem.starts_with('.')) {
    refuse("stem", "not the beginning of a file's name", printable(options.stem));
  }
  const bool makes_values = options.dequantize || options.experts != ExpertLayout::keep;
  if (makes_values && !(options.rules.empty() && options.recipes.targets.empty())) {
    refuse(options.dequantize ? "dequantize" : "experts",
           "rules and recipes name what is in the file: convert twice");
  }
  if (options.shard_bytes_max == 0) refuse("shard_bytes_max", "a shard holds something");
  if (options.staging_bytes_max == 0) refuse("staging_bytes_max", "nothing moves without staging");
}

void fail(Conversion& conversion, Finding finding) {
  finding.severity = Severity::error;
  conversion.plan.findings.push_back(std::move(finding));
}

// Whether the format can hold the tensor.
void check_target(Conversion& conversion, const PlannedTarget& target) {
  if (target.name == "__metadata__" || !is_utf8(target.name)) {
    fail(conversion, {.code = "convert.name",
                      .target = target.name,
                      .message = fmt::format("'{}' cannot be a tensor's name in safetensors",
                                             printable(target.name)),
                      .suggestion = "rename it with a rule"});
  }
  if (target.dtype == Dtype::c128) {
    fail(conversion, {.code = "plan.dtype",
                      .target = target.name,
                      .message = fmt::format("'{}' is C128, which safetensors does not have",
                                             printable(target.name)),
                      .found = "C128"});
  }
}

std::string file_name(const std::string& stem, std::size_t index, std::size_t count) {
  if (count == 1) return stem + ".safetensors";
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, index + 1, count);
}

// Cuts the tensors into files in their order. In a file the widest elements come first, so that
// each stands where its elements can be read in place; then names in order.
void lay_out(Conversion& conversion, const ConvertOptions& options) {
  const auto& targets = conversion.plan.targets;
  conversion.files.emplace_back();
  for (std::uint32_t i = 0; i < targets.size(); ++i) {
    const std::uint64_t bytes = targets[i].byte_count();
    const OutputFile& last = conversion.files.back();
    const bool fits = last.tensors.empty() || (last.data_bytes <= options.shard_bytes_max &&
                                               bytes <= options.shard_bytes_max - last.data_bytes);
    if (!options.one_file && !fits) conversion.files.emplace_back();
    conversion.files.back().tensors.push_back({.target = i});
    conversion.files.back().data_bytes += bytes;
  }
  if (conversion.files.size() > 1) {
    conversion.index_name = options.stem + ".safetensors.index.json";
  }
  for (std::size_t f = 0; f < conversion.files.size(); ++f) {
    OutputFile& file = conversion.files[f];
    if (!options.one_file) file.name = file_name(options.stem, f, conversion.files.size());
    std::ranges::sort(file.tensors, [&](const OutputTensor& a, const OutputTensor& b) {
      const PlannedTarget& left = targets[a.target];
      const PlannedTarget& right = targets[b.target];
      const unsigned left_bits = bits(left.dtype);
      const unsigned right_bits = bits(right.dtype);
      return left_bits != right_bits ? left_bits > right_bits : left.name < right.name;
    });
    std::uint64_t at = 0;
    for (OutputTensor& tensor : file.tensors) {
      tensor.begin = at;
      tensor.end = at += targets[tensor.target].byte_count();
    }
    file.header_bytes = header_text(conversion, file).size();
    conversion.bytes_to_write += file.byte_count();
    if (file.header_bytes - 8 <= header_bytes_max) continue;
    fail(conversion, {.code = "st.header_too_large",
                      .message = fmt::format("{} tensors do not fit the header of one file",
                                             file.tensors.size()),
                      .suggestion = "write a folder with smaller shards",
                      .found = fmt::format("{} bytes", file.header_bytes),
                      .expected = fmt::format("at most {}", header_bytes_max)});
  }
}

// What lists of tensors take while they are made and gone through. Generous.
std::uint64_t list_bytes(const Conversion& conversion) {
  constexpr std::uint64_t per_tensor = 1536;
  std::uint64_t bytes = 1 << 20;
  for (const TensorInfo& tensor : conversion.plan.catalog->tensors()) {
    bytes += 512 + 2 * tensor.name.size();
  }
  for (const PlannedTarget& target : conversion.plan.targets) {
    bytes += per_tensor + 6 * target.name.size();
    for (const Box& box : target.recipe.boxes) {
      bytes += 4 * (sizeof(Box) + box.dims.size() * sizeof(BoxDim));
    }
    if (target.recipe.constant) bytes += target.recipe.constant->size();
  }
  std::uint64_t header = 0;
  for (const OutputFile& file : conversion.files) header = std::max(header, file.header_bytes);
  return bytes + 2 * header;
}

// How many threads, and what each has in hand.
void choose_sizes(Conversion& conversion, const ConvertOptions& options) {
  const std::uint64_t lists = list_bytes(conversion);
  const std::uint64_t least = lists + thread_overhead + thread_bytes_least;
  std::uint64_t staging = std::max(options.staging_bytes_max, thread_bytes_least);
  std::uint64_t threads = options.threads != 0 ? options.threads
                                               : std::clamp(std::thread::hardware_concurrency(), 1u,
                                                            threads_default_max);
  if (const auto limit = options.memory_bytes_max) {
    if (*limit < least) {
      fail(conversion,
           {.code = "plan.over_budget",
            .message = fmt::format("the conversion needs at least {} of memory: {} for lists of "
                                   "tensors, the rest for bytes on their way",
                                   human_bytes(least), human_bytes(lists)),
            .suggestion = fmt::format("allow {} bytes", least),
            .found = fmt::format("{} bytes", *limit),
            .expected = fmt::format("{} bytes", least)});
    }
    const std::uint64_t room = std::max(*limit, least) - lists;
    threads = std::clamp<std::uint64_t>(room / (thread_overhead + thread_bytes_wanted), 1, threads);
    staging = std::min(staging, room - threads * thread_overhead);
  }
  threads = std::clamp<std::uint64_t>(staging / thread_bytes_wanted, 1, threads);
  const std::uint64_t each = std::min(staging / threads, thread_bytes_most);
  conversion.threads = static_cast<unsigned>(threads);
  conversion.window_bytes = each / 2 / page_bytes * page_bytes;
  conversion.staging_bytes = (each - conversion.window_bytes) / page_bytes * page_bytes;
  conversion.peak_bytes =
      lists + threads * (thread_overhead + conversion.window_bytes + conversion.staging_bytes);
}

}  // namespace

Conversion make_conversion(std::shared_ptr<const Catalog> catalog, const ConvertOptions& options) {
  if (catalog == nullptr) refuse("catalog", "there is no catalog");
  check_options(options);
  std::vector<Finding> findings;
  Conversion conversion;
  conversion.one_file = options.one_file;
  conversion.stem = options.stem;
  conversion.metadata = header_metadata(*catalog, findings);
  PlanOptions plan_options;
  plan_options.unexpected = options.unexpected;
  Outputs outputs = output_recipes(catalog, options, findings);
  plan_options.recipes = std::move(outputs.recipes);
  plan_options.known_sources = std::move(outputs.known_sources);
  // What has stood in the way once is not told again as left over.
  for (const Finding& finding : findings) {
    if (finding.severity != Severity::error) continue;
    plan_options.known_sources.insert(plan_options.known_sources.end(), finding.sources.begin(),
                                      finding.sources.end());
  }
  Skeleton skeleton;
  skeleton.targets.reserve(plan_options.recipes.targets.size());
  for (const TargetRecipe& recipe : plan_options.recipes.targets) {
    skeleton.targets.push_back(
        {.name = recipe.target, .shape = recipe.shape, .dtype = recipe.dtype});
  }
  conversion.plan = make_plan(std::move(catalog), skeleton, plan_options);
  Plan& plan = conversion.plan;
  plan.findings.insert(plan.findings.end(), findings.begin(), findings.end());
  for (const PlannedTarget& target : plan.targets) check_target(conversion, target);
  lay_out(conversion, options);
  choose_sizes(conversion, options);
  conversion.bytes_to_read = plan.bytes_to_read;
  plan.bytes_to_write = conversion.bytes_to_write;
  plan.peak_bytes = {{"cpu", conversion.peak_bytes}};
  sort_findings(plan.findings);
  return conversion;
}

}  // namespace loadstone
