// How many threads a conversion has, and what memory each of them.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "boxes/merges.h"
#include "catalog/reading_threads.h"
#include "convert/layout.h"
#include "engine/limits.h"
#include "plan/values.h"
#include "receipt/block_hash.h"

namespace loadstone {

namespace {

// Of window and staging: more threads are not worth less, and more is no quicker.
constexpr std::uint64_t thread_bytes_wanted = 1 << 20;
constexpr std::uint64_t thread_bytes_max = 32 << 20;
// What a thread takes beside that: its stack, and what the allocator keeps for it.
constexpr std::uint64_t thread_overhead = 256 << 10;

// Of each thread, copies of parts of blocks whose digest waits for what comes before them. A part
// that finds no room is read once more, so little is enough where memory is short.
constexpr std::uint64_t thread_digest_bytes = 1 << 20;
constexpr std::uint64_t thread_digest_bytes_min = 32 << 10;
// They have any size, so the allocator keeps about twice as much beside them, as measured.
constexpr std::uint64_t kept_by_allocator = 3;

// Of a tensor in a header beside its name: shape, dtype, place.
constexpr std::uint64_t info_bytes = 96;

std::uint64_t list_bytes_of(const std::vector<Box>& boxes) {
  std::uint64_t bytes = 0;
  for (const Box& box : boxes) bytes += 4 * (sizeof(Box) + box.dims.size() * sizeof(BoxDim));
  return bytes;
}

std::uint64_t importance_bytes(const Quantization& quantization) {
  return quantization.importance->size() * sizeof(float);
}

// What lists of tensors take while they are made and gone through. Generous.
std::uint64_t list_bytes(const Conversion& conversion) {
  constexpr std::uint64_t per_tensor = 1536;
  constexpr std::uint64_t per_digest = 1536;  // of a source tensor, and its place in a receipt
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
  // A vocabulary is held by the catalog and by the conversion, and grows into a header.
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
                              "tensors, the rest for bytes on their way",
                              human_bytes(least), human_bytes(lists)),
       .suggestion = fmt::format("allow {} bytes", least),
       .found = fmt::format("{} bytes", limit),
       .expected = fmt::format("{} bytes", least)});
}

}  // namespace

void choose_sizes(Conversion& conversion, const ConvertOptions& options) {
  const Catalog& catalog = *conversion.plan.catalog;
  const std::uint64_t reading_once = reading_bytes(catalog, 0);
  const std::uint64_t lists = list_bytes(conversion) + reading_once;
  const ValueSet values = values_of(conversion.plan);
  const Limits limits(values, SinkKind::files);
  // A block that is read once more to be hashed has a buffer.
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
  conversion.bytes_to_read = limits.bytes_to_read();
  conversion.peak_bytes = lists + threads * overhead_with(digest_bytes) + conversion.budget.bytes();
}

}  // namespace loadstone
