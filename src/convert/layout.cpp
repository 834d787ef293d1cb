#include "convert/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "boxes/merges.h"
#include "catalog/reading_threads.h"
#include "convert/choose/gguf_mix.h"
#include "convert/choose/quantize_config.h"
#include "convert/write/container.h"
#include "engine/limits.h"
#include "formats/metadata.h"
#include "loadstone/name_hash.h"
#include "plan/values.h"
#include "receipt/block_hash.h"

namespace loadstone {

namespace {

// Groups targets that must be in the same file: targets that share a scale, in the position of the
// first of them, or a single target.
std::vector<std::vector<std::uint32_t>> units_of(const Plan& plan) {
  std::vector<std::vector<std::uint32_t>> units;
  std::map<std::string_view, std::size_t> unit_of;
  for (std::uint32_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.quantization && !target.quantization->group.empty()) {
      const auto [known, is_new] = unit_of.emplace(target.quantization->group, units.size());
      if (!is_new) {
        units[known->second].push_back(i);
        continue;
      }
    }
    units.push_back({i});
  }
  return units;
}

void fill_files(Conversion& conversion, const ConvertOptions& options) {
  const Container& container = container_of(conversion.format);
  Plan& plan = conversion.plan;
  const QuantizeStyle style = container.style(options);
  conversion.files.emplace_back();
  for (const auto& unit : units_of(plan)) {
    std::uint64_t bytes = 0;
    std::vector<OutputTensor> tensors;
    for (const std::uint32_t i : unit) {
      for (OutputTensor& tensor : output_tensors(conversion, plan.targets[i], style)) {
        tensor.target = i;
        tensor.end = tensor.encoding.byte_count(tensor.shape.numel().value_or(0)).value_or(0);
        if (auto finding = container.refuse(tensor, options)) {
          plan.findings.push_back(*std::move(finding));
        }
        bytes += tensor.end;
        tensors.push_back(std::move(tensor));
      }
    }
    const OutputFile& last = conversion.files.back();
    const bool fits = last.tensors.empty() || (last.data_bytes <= options.shard_bytes_max &&
                                               bytes <= options.shard_bytes_max - last.data_bytes);
    if (!conversion.one_file && !fits) conversion.files.emplace_back();
    OutputFile& file = conversion.files.back();
    std::ranges::move(tensors, std::back_inserter(file.tensors));
    file.data_bytes += bytes;
  }
}

// Reports a component with the name of a different tensor.
void check_names(Conversion& conversion) {
  NameSet names;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) {
      if (names.insert(tensor.name).second) continue;
      conversion.plan.findings.push_back(
          {.severity = Severity::error,
           .code = "plan.duplicate",
           .target = tensor.name,
           .message = fmt::format("two tensors of the output would have the name '{}': a component "
                                  "of a quantized tensor and another tensor",
                                  printable(tensor.name)),
           .suggestion =
               "rename one of them with a rule, or exclude the quantized tensor (--exclude)"});
    }
  }
}

constexpr const char* file_type_key = "general.file_type";

// Number of values in matrices, by the name of their encoding.
using EncodingCounts = std::map<std::string_view, std::uint64_t>;

void count_values(EncodingCounts& counts, const Encoding& encoding, const Shape& shape) {
  if (shape.rank() >= 2) counts[encoding.name()] += shape.numel().value_or(0);
}

// Returns the encoding with the most values; empty without a matrix.
std::string_view main_encoding(const EncodingCounts& counts) {
  const auto most = std::ranges::max_element(counts, {}, [](const auto& c) { return c.second; });
  return most == counts.end() ? std::string_view() : most->first;
}

// Corrects a general.file_type of the source that does not describe the output, or removes it if no
// file type fits. A value that the caller gave, or that a mix set, stays.
void settle_file_type(const ConvertOptions& options, Conversion& conversion) {
  const Metadata& before = conversion.plan.catalog->metadata();
  const auto source = before.find(file_type_key);
  const auto found = conversion.metadata.find(file_type_key);
  if (source == before.end() || found == conversion.metadata.end()) return;
  const bool is_settled = text_of(source->second) != text_of(found->second);
  if (is_settled || options.metadata.contains(file_type_key)) return;
  EncodingCounts of_source;
  for (const TensorInfo& tensor : conversion.plan.catalog->tensors()) {
    count_values(of_source, tensor.encoding, tensor.shape);
  }
  EncodingCounts of_output;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) {
      count_values(of_output, tensor.encoding, tensor.shape);
    }
  }
  const std::string_view main = main_encoding(of_output);
  const bool is_gguf = source->second.type != MetadataType::string;
  if (is_gguf && main == main_encoding(of_source)) return;
  std::vector<std::uint64_t> file_types;
  for (const Mix& mix : mixes()) {
    if (mix.type.name() == main) file_types.push_back(mix.file_type);
  }
  const auto is_told = [&](std::uint64_t type) {
    return text_of(found->second) == std::to_string(type);
  };
  const bool is_text = conversion.format != FileFormat::gguf;
  if (file_types.empty()) {
    conversion.metadata.erase(found);
  } else if (is_text && std::ranges::none_of(file_types, is_told)) {
    found->second = {.value = std::to_string(file_types.front())};
  } else if (!is_text) {
    const auto known = std::ranges::find_if(file_types, is_told);
    found->second = {.value = known == file_types.end() ? file_types.front() : *known,
                     .type = MetadataType::u32};
  }
}

// Warns of vectors in a language model with a dtype in which llama.cpp cannot compute.
void tell_narrow_vectors(const ConvertOptions& options, Conversion& conversion) {
  if (!options.dtype || *options.dtype == Dtype::f32 || !mix_model(conversion.metadata)) return;
  std::vector<std::string> names;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) {
      const bool is_narrow = tensor.encoding == Encoding(*options.dtype);
      if (tensor.shape.rank() == 1 && is_narrow) names.push_back(tensor.name);
    }
  }
  if (names.empty()) return;
  conversion.plan.findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.unread",
       .sources = names,
       .message = fmt::format("llama.cpp needs vectors and norms in F32, but {} {} {}: {}",
                              counted(names.size(), "tensor"), names.size() == 1 ? "gets" : "get",
                              name(*options.dtype), name_list(names)),
       .suggestion =
           "to keep them in F32, pass --quantize f16 or --quantize bf16 instead of --dtype"});
}

// Window and staging memory per thread. If each thread would get less than the wanted bytes, fewer
// threads run: more threads would not be faster.
constexpr std::uint64_t thread_bytes_wanted = 1 << 20;
constexpr std::uint64_t thread_bytes_max = 32 << 20;
// Other memory per thread: its stack, and the allocator's reserve for it.
constexpr std::uint64_t thread_overhead = 256 << 10;

// Memory for parts of blocks that a thread keeps until the bytes before them are hashed. A part
// that does not fit is read again, so a small amount suffices if memory is short.
constexpr std::uint64_t thread_digest_bytes = 1 << 20;
constexpr std::uint64_t thread_digest_bytes_min = 32 << 10;
// Factor for the memory above. In addition to the blocks, the allocator holds about twice their
// size (measured), because the blocks have different sizes.
constexpr std::uint64_t kept_by_allocator = 3;

// Estimated bytes of a tensor's entry in a header without its name: shape, dtype and offsets.
constexpr std::uint64_t info_bytes = 96;

std::uint64_t list_bytes_of(const std::vector<Box>& boxes) {
  std::uint64_t bytes = 0;
  for (const Box& box : boxes) bytes += 4 * (sizeof(Box) + box.dims.size() * sizeof(BoxDim));
  return bytes;
}

std::uint64_t importance_bytes(const Quantization& quantization) {
  return quantization.importance->size() * sizeof(float);
}

// Returns a generous estimate of the memory for lists of tensors.
std::uint64_t list_bytes(const Conversion& conversion) {
  constexpr std::uint64_t per_tensor = 1536;
  constexpr std::uint64_t per_digest = 1536;  // per source tensor, including its entry in a receipt
  std::uint64_t bytes = 1 << 20;
  for (const TensorInfo& tensor : conversion.plan.catalog->tensors()) {
    bytes += 512 + per_digest + 2 * tensor.name.size();
  }
  for (const PlannedTarget& target : conversion.plan.targets) {
    bytes += per_tensor + 6 * target.name.size();
    if (target.quantization) {
      bytes += per_tensor + 4 * target.name.size();
      if (target.quantization->importance) bytes += importance_bytes(*target.quantization);
    }
    bytes += list_bytes_of(target.recipe.boxes);
    if (target.recipe.merge != nullptr) {
      bytes += per_tensor + 4 * target.recipe.merge->terms.size() * sizeof(Term);
      for_each_operand(*target.recipe.merge,
                       [&](const Operand& each) { bytes += list_bytes_of(each.boxes); });
    }
    if (target.recipe.constant) bytes += target.recipe.constant->size();
  }
  std::uint64_t header = 0;
  std::uint64_t metadata = 0;
  for (const OutputFile& file : conversion.files) {
    header = std::max(header, file.header_bytes);
    std::uint64_t infos = 0;
    for (const OutputTensor& tensor : file.tensors) {
      bytes += sizeof(OutputTensor) + 2 * tensor.name.size();
      infos += info_bytes + tensor.name.size();
    }
    metadata = std::max(metadata, file.header_bytes - std::min(infos, file.header_bytes));
  }
  // A vocabulary is in memory three times: in the catalog, in the conversion and in a header.
  bytes += 3 * metadata;
  for (const ExtraFile& file : conversion.extras) bytes += 2 * file.text.size();
  return bytes + 2 * header;
}

void refuse_memory(Conversion& conversion, std::uint64_t limit, std::uint64_t least,
                   std::uint64_t lists) {
  conversion.plan.findings.push_back(
      {.severity = Severity::error,
       .code = "plan.over_budget",
       .message = fmt::format("the conversion needs at least {} of memory: {} for lists of "
                              "tensors, the rest for bytes that are read and written",
                              human_bytes(least), human_bytes(lists)),
       .suggestion = fmt::format("allow {} bytes", least),
       .found = counted(limit, "byte"),
       .expected = counted(least, "byte")});
}

}  // namespace

void lay_out(Conversion& conversion, const ConvertOptions& options) {
  fill_files(conversion, options);
  settle_file_type(options, conversion);
  if (conversion.format == FileFormat::gguf) tell_narrow_vectors(options, conversion);
  if (!options.quantize.formats.empty()) check_names(conversion);
  const Container& container = container_of(conversion.format);
  if (conversion.files.size() > 1 && !container.index_suffix().empty()) {
    conversion.index_name = conversion.stem + std::string(container.index_suffix());
  }
  if (conversion.is_split && conversion.files.size() == 1) {
    conversion.is_split = false;
    conversion.one_file = true;
  }
  for (std::size_t f = 0; f < conversion.files.size(); ++f) {
    OutputFile& file = conversion.files[f];
    if (!conversion.one_file) {
      file.name = container.shard_name(conversion.stem, f, conversion.files.size());
    }
    container.place(conversion, file);
    file.header_bytes = container.header(conversion, f).size();
    conversion.bytes_to_write += file.byte_count();
    if (auto finding = container.refuse_header(file)) {
      conversion.plan.findings.push_back(*std::move(finding));
    }
  }
}

// Assigns files to parts, the largest file first, each to the part with the fewest bytes.
std::vector<std::uint32_t> files_of_part(const Conversion& conversion, const ConvertPart& part) {
  return only_errors([&] {
    if (part.count == 0 || part.index == 0 || part.index > part.count) {
      refuse_option("part", "the number of a part must be between 1 and the number of parts");
    }
    const auto& files = conversion.files;
    std::vector<std::uint32_t> order(files.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::ranges::greater(),
                             [&](std::uint32_t file) { return files[file].byte_count(); });
    // If there are more parts than files, the last parts get no files.
    std::vector<std::uint64_t> bytes(std::min<std::size_t>(part.count, files.size()), 0);
    std::vector<std::uint32_t> mine;
    for (const std::uint32_t file : order) {
      const auto least = std::ranges::min_element(bytes);
      *least += files[file].byte_count();
      if (least - bytes.begin() == part.index - 1) mine.push_back(file);
    }
    std::ranges::sort(mine);
    return mine;
  });
}

void choose_sizes(Conversion& conversion, const ConvertOptions& options) {
  const Catalog& catalog = *conversion.plan.catalog;
  const std::uint64_t reading_once = reading_bytes(catalog, 0);
  const std::uint64_t lists = list_bytes(conversion) + reading_once;
  const ValueSet values = values_of(conversion.plan, SinkKind::files);
  const Limits limits(values);
  // Includes a buffer for reading a block again to hash it.
  const auto overhead_with = [&](std::uint64_t digest_bytes) {
    return thread_overhead + kept_by_allocator * digest_bytes + receipt_block_bytes +
           limits.box_bytes() + reading_bytes(catalog, 1) - reading_once;
  };
  std::uint64_t digest_bytes = thread_digest_bytes;
  LimitOptions run = {.threads = reading_threads(catalog, options.threads, defaults::threads_max),
                      .bytes_max = options.staging_bytes_max,
                      .thread_bytes_wanted = thread_bytes_wanted,
                      .thread_bytes_max = thread_bytes_max};
  if (const auto limit = options.memory_bytes_max) {
    const std::uint64_t thread_least = limits.thread_bytes_least();
    const std::uint64_t least =
        lists + overhead_with(thread_digest_bytes_min) + thread_least + limits.held_bytes(1);
    if (*limit < least) refuse_memory(conversion, *limit, least, lists);
    const std::uint64_t most = std::max(*limit, least);
    digest_bytes = std::min(thread_digest_bytes, thread_digest_bytes_min + (most - least) / 64);
    const std::uint64_t room = most - lists;
    const std::uint64_t overhead = overhead_with(digest_bytes);
    const std::uint64_t wanted = overhead + std::max(thread_bytes_wanted, thread_least);
    unsigned& threads = run.threads;
    while (threads > 1 && threads * wanted + limits.held_bytes(threads) > room) --threads;
    run.bytes_max = std::min(run.bytes_max, room - threads * overhead - limits.held_bytes(threads));
  }
  conversion.budget = limits.budget(run);
  const unsigned threads = conversion.budget.threads;
  conversion.digest_bytes = threads * digest_bytes;
  conversion.bytes_to_read = limits.bytes_to_read(conversion.budget);
  conversion.peak_bytes = lists + threads * overhead_with(digest_bytes) + conversion.budget.bytes();
}

}  // namespace loadstone
