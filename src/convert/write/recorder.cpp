#include "convert/write/recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "loadstone/error.h"
#include "loadstone/version.h"
#include "receipt/file_digest.h"

namespace loadstone {

namespace {

const Catalog& catalog_of(const Conversion& conversion) { return *conversion.plan.catalog; }

// The shard of the receipt's file; null where the catalog has none of that name.
const Shard* find_shard(const Catalog& catalog, const ReceiptFile& file) {
  std::size_t begin = 0;
  std::size_t end = catalog.shards().size();
  const auto& checkpoints = catalog.checkpoints();
  if (!checkpoints.empty()) {
    if (file.checkpoint >= checkpoints.size()) return nullptr;
    for (std::uint32_t i = 0; i < file.checkpoint; ++i) begin += checkpoints[i]->shards().size();
    end = begin + checkpoints[file.checkpoint]->shards().size();
  }
  for (std::size_t i = begin; i < end; ++i) {
    if (receipt_path(catalog.shards()[i]) == file.path) return &catalog.shards()[i];
  }
  return nullptr;
}

// The first thing of a file that has other bytes; empty where nothing has.
std::string changed_in(DigestKind kind, const ReceiptFile& file, ByteSource& source) {
  const std::uint64_t bytes = source.identity().bytes;
  if (bytes != file.bytes) return fmt::format("has {} bytes, not {}", bytes, file.bytes);
  if (file_digest(kind, source, 0, file.header_ranges) != file.header_digest) {
    return "has other bytes in its header";
  }
  for (const ReceiptTensor& tensor : file.tensors) {
    if (file_digest(kind, source, tensor.begin, ranges_of(tensor)) != tensor.digest) {
      return fmt::format("has other bytes in tensor '{}'", printable(tensor.name));
    }
  }
  return {};
}

std::string changed_sources(const Conversion& conversion, const Receipt& receipt,
                            Storage& storage) {
  for (const ReceiptFile& file : receipt.sources) {
    const Shard* const shard = find_shard(catalog_of(conversion), file);
    if (shard == nullptr) {
      return fmt::format("is made of '{}', which is not there", printable(file.path));
    }
    const auto source = storage.open(shard->path);
    const std::string changed = changed_in(receipt.kind, file, *source);
    if (!changed.empty()) {
      return fmt::format("is made of '{}', which {}", printable(file.path), changed);
    }
  }
  return {};
}

// A receipt says of this file what the plan says of it.
bool is_of(const ReceiptFile& found, const ReceiptFile& planned) {
  if (found.path != planned.path || found.bytes != planned.bytes ||
      found.header_ranges != planned.header_ranges ||
      found.tensors.size() != planned.tensors.size()) {
    return false;
  }
  for (std::size_t i = 0; i < found.tensors.size(); ++i) {
    ReceiptTensor without = found.tensors[i];
    without.digest.clear();
    if (without != planned.tensors[i]) return false;
  }
  return true;
}

}  // namespace

ReceiptFile planned_file(const Conversion& conversion, std::uint32_t number,
                         const std::string& path) {
  const Plan& plan = conversion.plan;
  const OutputFile& file = conversion.files[number];
  ReceiptFile receipt = {.path = path, .bytes = file.byte_count()};
  std::uint64_t at = 0;
  const auto header_until = [&](std::uint64_t end) {
    if (end > at) receipt.header_ranges.push_back({at, end});
  };
  for (const OutputTensor& tensor : file.tensors) {
    const PlannedTarget& target = plan.targets[tensor.target];
    const bool is_part = tensor.part != OutputTensor::no_part;
    ReceiptTensor entry = {.name = tensor.name,
                           .encoding = std::string(tensor.encoding.name()),
                           .shape = {tensor.shape.extents().begin(), tensor.shape.extents().end()},
                           .begin = file.header_bytes + tensor.begin,
                           .end = file.header_bytes + tensor.end,
                           .recipe = tensor.constant ? "constant"
                                     : is_part       ? "encode"
                                                     : recipe_word(plan, target)};
    if (target.quantization) {
      entry.codec = target.quantization->encoding;
      if (!target.quantization->dialect.empty()) {
        entry.codec += " (" + target.quantization->dialect + ")";
      }
      if (is_part) {
        const auto parts = quantized_parts(*target.quantization, target.shape, target.dtype);
        if (tensor.part < parts.size()) entry.component = parts[tensor.part].name;
      }
    }
    if (!tensor.constant) entry.sources = source_names(plan, target);
    header_until(entry.begin);
    at = entry.end;
    receipt.tensors.push_back(std::move(entry));
  }
  header_until(receipt.bytes);
  return receipt;
}

ReceiptRecorder::ReceiptRecorder(const Conversion& conversion, const ValueSet& values,
                                 const OpenShards& shards, const std::vector<bool>& wanted,
                                 DigestKind kind)
    : conversion_(conversion),
      sources_(values, shards, kind, conversion.files.size(), conversion.digest_bytes / 2),
      outputs_(kind, conversion.digest_bytes / 2),
      items_(conversion.files.size()) {
  for (std::uint32_t f = 0; f < conversion.files.size(); ++f) {
    if (!wanted[f]) continue;
    for (const OutputTensor& tensor : conversion.files[f].tensors) {
      std::vector<ByteRange> all;
      if (tensor.byte_count() > 0) all.push_back({0, tensor.byte_count()});
      items_[f].push_back(outputs_.add(std::move(all)));
      sources_.need(f, values[tensor.target]);
    }
  }
  sources_.prepare();
}

void ReceiptRecorder::wrote(std::uint32_t file, const OutputTensor& tensor, std::uint64_t offset,
                            std::span<const std::byte> bytes) {
  const auto index = static_cast<std::size_t>(&tensor - conversion_.files[file].tensors.data());
  outputs_.update(items_[file].at(index), offset, bytes);
}

Receipt ReceiptRecorder::finish(std::uint32_t number, const std::string& path,
                                ByteSource& written) {
  ReceiptFile file = planned_file(conversion_, number, path);
  file.header_digest = file_digest(outputs_.kind(), written, 0, file.header_ranges);
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    const std::uint32_t item = items_[number][i];
    outputs_.complete(item, [&](std::uint64_t begin, std::span<std::byte> to) {
      written.read(file.tensors[i].begin + begin, to);
    });
    file.tensors[i].digest = outputs_.digest(item);
  }
  sources_.complete(number);
  Receipt receipt = {.kind = outputs_.kind(), .program = LOADSTONE_VERSION};
  receipt.sources = sources_.files(number);
  receipt.outputs.push_back(std::move(file));
  return receipt;
}

Receipt joined_receipt(DigestKind kind, const std::vector<Receipt>& files) {
  Receipt joined = {.kind = kind, .program = LOADSTONE_VERSION};
  std::map<std::pair<std::uint32_t, std::string>, ReceiptFile> sources;
  const auto refuse = [](const std::string& path, const std::string& tensor) {
    throw Error("io.changed", "the source had other bytes for another file of the output",
                {.path = path, .tensor = tensor});
  };
  for (const Receipt& receipt : files) {
    joined.outputs.insert(joined.outputs.end(), receipt.outputs.begin(), receipt.outputs.end());
    for (const ReceiptFile& file : receipt.sources) {
      auto& known = sources[{file.checkpoint, file.path}];
      if (known.path.empty()) {
        known = file;
        continue;
      }
      if (known.bytes != file.bytes || known.header_digest != file.header_digest) {
        refuse(file.path, {});
      }
      known.tensors.insert(known.tensors.end(), file.tensors.begin(), file.tensors.end());
    }
  }
  for (auto& [key, file] : sources) {
    const auto order = [](const ReceiptTensor& tensor) {
      const ByteRange first =
          tensor.ranges.empty() ? ByteRange{0, UINT64_MAX} : tensor.ranges.front();
      return std::tuple(tensor.begin, tensor.end, tensor.name, first.begin, first.end);
    };
    std::ranges::stable_sort(file.tensors, {}, order);
    std::vector<ReceiptTensor> tensors;
    for (ReceiptTensor& tensor : file.tensors) {
      const bool is_same = !tensors.empty() && tensors.back().name == tensor.name &&
                           tensors.back().begin == tensor.begin &&
                           tensors.back().ranges == tensor.ranges;
      if (!is_same) {
        tensors.push_back(std::move(tensor));
      } else if (tensors.back().digest != tensor.digest) {
        refuse(file.path, tensor.name);
      }
    }
    file.tensors = std::move(tensors);
    joined.sources.push_back(std::move(file));
  }
  return joined;
}

ReceiptFile receipt_of_extra(DigestKind kind, const std::string& name, ByteSource& file) {
  ReceiptFile receipt = {.path = name, .bytes = file.identity().bytes};
  if (receipt.bytes > 0) receipt.header_ranges.push_back({0, receipt.bytes});
  receipt.header_digest = file_digest(kind, file, 0, receipt.header_ranges);
  return receipt;
}

KeptFile check_kept(const Conversion& conversion, std::uint32_t number, DigestKind kind,
                    const std::string& receipt_text, const std::string& path, Storage& storage,
                    bool checks_sources) {
  Receipt receipt;
  try {
    receipt = receipt_from_json(receipt_text);
  } catch (const Error&) {
    return {{}, "has no receipt of the run that finished it"};
  }
  if (receipt.kind != kind) {
    return {{}, fmt::format("has digests by {}, not {}", name(receipt.kind), name(kind))};
  }
  const ReceiptFile planned = planned_file(conversion, number, conversion.files[number].name);
  if (receipt.outputs.size() != 1 || !is_of(receipt.outputs.front(), planned)) {
    return {{}, "has the receipt of another file"};
  }
  const auto file = storage.open(path);
  std::string changed = changed_in(kind, receipt.outputs.front(), *file);
  if (changed.empty() && checks_sources) changed = changed_sources(conversion, receipt, storage);
  if (!changed.empty()) return {{}, std::move(changed)};
  return {std::move(receipt), {}};
}

}  // namespace loadstone
