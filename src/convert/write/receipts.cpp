#include "convert/write/receipts.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "catalog/assembled_file.h"
#include "loadstone/error.h"
#include "receipt/file_digest.h"

namespace loadstone {

ReceiptFile planned_file(const Conversion& conversion, std::uint32_t number) {
  const OutputFile& file = conversion.files[number];
  ReceiptFile receipt = {.path = file.name, .bytes = file.byte_count()};
  std::uint64_t at = 0;
  const auto header_until = [&](std::uint64_t end) {
    if (end > at) receipt.header_ranges.push_back({at, end});
  };
  for (const OutputTensor& tensor : file.tensors) {
    const PlannedTarget& target = conversion.plan.targets[tensor.target];
    std::vector<QuantizedPart> parts;
    if (tensor.part != OutputTensor::no_part) {
      parts = quantized_parts(*target.quantization, target.shape, target.dtype);
    }
    ReceiptTensor entry =
        planned_tensor(conversion.plan, target, parts.empty() ? nullptr : &parts.at(tensor.part));
    entry.name = tensor.name;
    entry.encoding = tensor.encoding.name();
    entry.shape = {tensor.shape.extents().begin(), tensor.shape.extents().end()};
    entry.begin = file.header_bytes + tensor.begin;
    entry.end = file.header_bytes + tensor.end;
    if (tensor.constant) {
      entry.recipe = "constant";
      entry.sources.clear();
    }
    if (target.quantization && !target.quantization->dialect.empty()) {
      entry.codec += " (" + target.quantization->dialect + ")";
    }
    header_until(entry.begin);
    at = entry.end;
    receipt.tensors.push_back(std::move(entry));
  }
  header_until(receipt.bytes);
  return receipt;
}

FileReceipts::FileReceipts(const Conversion& conversion, const ValueSet& values,
                           const OpenShards& shards, const std::vector<bool>& wanted,
                           DigestKind kind)
    : ReceiptRecorder(values, shards, kind, conversion.files.size(), conversion.digest_bytes / 2),
      conversion_(conversion) {
  for (std::uint32_t file = 0; file < conversion.files.size(); ++file) {
    if (!wanted[file]) continue;
    for (const OutputTensor& tensor : conversion.files[file].tensors) {
      add(file, tensor.byte_count());
      need(file, values[tensor.target]);
    }
  }
  prepare();
}

void FileReceipts::note_loss(std::uint32_t target, const EncodingLoss& loss) {
  const std::lock_guard lock(losses_mutex_);
  losses_.emplace(target, loss);
}

Receipt FileReceipts::finish(std::uint32_t number, ByteSource& written) {
  ReceiptFile file = planned_file(conversion_, number);
  const auto read = [&](std::size_t output, std::uint64_t begin, std::span<std::byte> to) {
    written.read(file.tensors[output].begin + begin, to);
  };
  const auto goes_on = [&](std::uint64_t) { return !stop_.load(std::memory_order_relaxed); };
  for (std::size_t step = 0; step < step_count(number) && !stop_; ++step) {
    complete(number, step, read, goes_on);
  }
  if (stop_) throw Error("cancelled", "the caller stopped the operation");
  Receipt receipt = receipt_of(number, file.tensors);
  file.header_digest = file_digest(receipt.kind, written, 0, file.header_ranges);
  const std::lock_guard lock(losses_mutex_);
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    const OutputTensor& tensor = conversion_.files[number].tensors[i];
    const auto found = losses_.find(tensor.target);
    if (tensor.part == 0 && found != losses_.end()) file.tensors[i].loss = found->second;
  }
  receipt.outputs.push_back(std::move(file));
  return receipt;
}

// Returns a text about the first part of a file with changed bytes, or an empty string.
static std::string changed_in(DigestKind kind, const ReceiptFile& file, ByteSource& source,
                              std::uint64_t bytes, const GoesOn& goes_on) {
  if (bytes != file.bytes) return fmt::format("now has {} bytes instead of {}", bytes, file.bytes);
  if (file_digest(kind, source, 0, file.header_ranges, goes_on) != file.header_digest) {
    return "now has different bytes in its header";
  }
  for (const ReceiptTensor& tensor : file.tensors) {
    if (file_digest(kind, source, tensor.begin, ranges_of(tensor), goes_on) != tensor.digest) {
      return fmt::format("now has different bytes in tensor '{}'", printable(tensor.name));
    }
  }
  return {};
}

static void digest_again(DigestKind kind, ReceiptFile& file, ByteSource& source,
                         const GoesOn& goes_on) {
  file.header_digest = file_digest(kind, source, 0, file.header_ranges, goes_on);
  for (ReceiptTensor& tensor : file.tensors) {
    tensor.digest = file_digest(kind, source, tensor.begin, ranges_of(tensor), goes_on);
  }
}

// Compares the sources with the receipt, and computes their digests of `kind`. Returns a text about
// the first changed source, or an empty string.
static std::string changed_source(Receipt& receipt, DigestKind kind, const Catalog& catalog,
                                  Storage& storage, const GoesOn& goes_on) {
  for (ReceiptFile& file : receipt.sources) {
    std::string changed = "is missing";
    for (std::uint32_t i = 0; i < catalog.shards().size(); ++i) {
      const ReceiptFile now = source_file(catalog, i);
      if (now.path != file.path || now.checkpoint != file.checkpoint) continue;
      const auto source = open_shard(storage, catalog, i);
      const std::uint64_t bytes =
          catalog.assembly(i) ? shard_bytes(catalog, i) : source->identity().bytes;
      changed = changed_in(receipt.kind, file, *source, bytes, goes_on);
      if (changed.empty() && kind != receipt.kind) digest_again(kind, file, *source, goes_on);
      break;
    }
    if (!changed.empty()) {
      return fmt::format("was made from '{}', which {}", printable(file.path), changed);
    }
  }
  return {};
}

KeptFile check_kept(const ReceiptFile& planned, std::optional<DigestKind> wanted,
                    const std::string& path, std::string_view text, const Catalog& catalog,
                    bool compares_sources, Storage& storage, const GoesOn& goes_on) {
  Receipt receipt;
  try {
    receipt = receipt_from_json(text);
  } catch (const Error&) {
    return {.receipt = {}, .changed = "the earlier run's receipt for it is missing"};
  }
  std::vector<ReceiptFile> found = receipt.outputs;
  for (ReceiptFile& file : found) {
    file.header_digest.clear();
    for (ReceiptTensor& tensor : file.tensors) {
      tensor.digest.clear();
      tensor.loss.reset();
    }
  }
  if (found != std::vector{planned}) {
    return {.receipt = {}, .changed = "its receipt belongs to a different file"};
  }
  const auto written = storage.open(path);
  const DigestKind kind = wanted.value_or(receipt.kind);
  const bool is_again = kind != receipt.kind;
  std::uint64_t bytes_read = 0;
  const auto of_file = [&](std::uint64_t bytes) {
    bytes_read += bytes;
    return goes_on(bytes);
  };
  const auto again = [&](std::uint64_t bytes) {
    bytes_read += bytes;
    return goes_on(0);
  };
  std::string changed = changed_in(receipt.kind, receipt.outputs.front(), *written,
                                   written->identity().bytes, of_file);
  if (changed.empty() && (compares_sources || is_again)) {
    changed = changed_source(receipt, kind, catalog, storage, again);
  }
  if (!changed.empty()) return {{}, std::move(changed), bytes_read};
  if (is_again) digest_again(kind, receipt.outputs.front(), *written, again);
  receipt.kind = kind;
  return {std::move(receipt), {}, bytes_read};
}

}  // namespace loadstone
