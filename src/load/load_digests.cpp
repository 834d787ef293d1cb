#include "load/load_digests.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "engine/team.h"
#include "loadstone/version.h"
#include "plan/origins.h"

namespace loadstone {

namespace {

// Whether this call gives the target a value that a receipt can tell.
bool gets_value(const PlannedTarget& target, const Destination& destination) {
  if (!is_delivered(target.recipe.origin)) return false;
  if (target.delivery == Delivery::memory) {
    return destination.data != nullptr || !destination.parts.empty();
  }
  return target.delivery != Delivery::none;
}

}  // namespace

LoadDigests::LoadDigests(const Plan& plan, std::span<const Destination> destinations,
                         const OpenShards& shards, DigestKind kind)
    : plan_(plan), kind_(kind), sources_(plan, shards, kind, 1) {
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    if (gets_value(plan.targets[i], destinations[i])) sources_.need(0, plan.targets[i]);
  }
  sources_.prepare();
}

ReceiptTensor LoadDigests::entry_of(const PlannedTarget& target, Encoding encoding,
                                    const Shape& shape, std::uint64_t bytes) const {
  return {.name = target.name,
          .encoding = std::string(encoding.name()),
          .shape = {shape.extents().begin(), shape.extents().end()},
          .end = bytes,
          .recipe = recipe_word(plan_, target),
          .sources = source_names(plan_, target)};
}

void LoadDigests::add_entries(std::uint32_t number, std::vector<Entry>& entries) {
  const PlannedTarget& target = plan_.targets[number];
  if (target.quantization) {
    std::size_t part = 0;
    for (const QuantizedPart& each :
         quantized_parts(*target.quantization, target.shape, target.dtype)) {
      ReceiptTensor tensor = entry_of(target, Encoding(each.dtype), each.shape, each.byte_count());
      tensor.component = each.name;
      tensor.codec = target.quantization->encoding;
      tensor.recipe = "encode";
      entries.push_back({std::move(tensor), number, part++});
    }
    return;
  }
  ReceiptTensor tensor =
      entry_of(target, Encoding(target.dtype), target.shape, target.byte_count());
  const Box* const box = whole_copy(plan_, target);
  const std::string* const known = box == nullptr ? nullptr : sources_.whole_digest(0, box->source);
  if (known != nullptr) tensor.digest = *known;
  entries.push_back({std::move(tensor), number});
}

std::string LoadDigests::digest_in_memory(const Entry& entry, MemorySink& sink) const {
  const std::uint64_t bytes = entry.tensor.end;
  if (bytes == 0) return digest_of(kind_, {});
  const std::byte* const place = sink.place(entry.target, entry.part);
  if (place != nullptr) return digest_of(kind_, {place, bytes});
  std::vector<std::byte> block(std::min(bytes, receipt_block_bytes));
  std::vector<BlockDigest> blocks;
  for (std::uint64_t at = 0; at < bytes; at += block.size()) {
    const auto read = std::span(block).first(std::min<std::uint64_t>(block.size(), bytes - at));
    sink.read(entry.target, entry.part, at, read);
    blocks.push_back(hash_block(kind_, read));
  }
  const ByteRange all{0, bytes};
  return tree_digest(kind_, {&all, 1}, blocks);
}

std::shared_ptr<const Receipt> LoadDigests::finish(std::span<const Destination> destinations,
                                                   MemorySink& sink, unsigned threads) {
  sources_.complete(0);
  Receipt receipt = {.kind = kind_, .program = LOADSTONE_VERSION, .sources = sources_.files(0)};
  std::vector<Entry> entries;
  for (std::uint32_t i = 0; i < plan_.targets.size(); ++i) {
    if (gets_value(plan_.targets[i], destinations[i])) add_entries(i, entries);
  }
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> stop = false;
  run_team(
      threads, stop, nullptr, [] { return Progress{}; },
      [&] {
        for (std::size_t i = next++; i < entries.size() && !stop; i = next++) {
          Entry& entry = entries[i];
          // A view of a part of a file has no memory here, and no entry.
          const bool is_readable =
              entry.tensor.end == 0 || sink.has_memory(entry.target, entry.part);
          if (entry.tensor.digest.empty() && is_readable) {
            entry.tensor.digest = digest_in_memory(entry, sink);
          }
        }
      });
  for (Entry& entry : entries) {
    if (!entry.tensor.digest.empty()) receipt.targets.push_back(std::move(entry.tensor));
  }
  return std::make_shared<const Receipt>(std::move(receipt));
}

}  // namespace loadstone
