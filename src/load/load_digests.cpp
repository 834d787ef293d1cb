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

// Returns true if this load gives the target a value that a receipt can record.
bool gets_value(const PlannedTarget& target, const Destination& destination) {
  if (!is_delivered(target.recipe.origin)) return false;
  if (target.delivery == Delivery::memory) {
    return destination.data != nullptr || !destination.parts.empty();
  }
  return target.delivery != Delivery::none;
}

}  // namespace

LoadDigests::LoadDigests(const Plan& plan, const ValueSet& values,
                         std::span<const Destination> destinations, const OpenShards& shards,
                         MemorySink& sink, DigestKind kind)
    : plan_(plan),
      sink_(sink),
      sources_(values, shards, kind, 1),
      outputs_(kind),
      first_entry_(plan.targets.size(), SIZE_MAX) {
  for (std::uint32_t i = 0; i < plan.targets.size(); ++i) {
    if (!gets_value(plan.targets[i], destinations[i])) continue;
    sources_.need(0, values[i]);
    add_entries(i);
  }
  sources_.prepare();
  sink.watch([this](std::uint32_t target, std::size_t part, std::uint64_t offset,
                    std::span<const std::byte> bytes) {
    if (first_entry_[target] == SIZE_MAX) return;
    const Entry& entry = entries_[first_entry_[target] + part];
    if (entry.copied == nullptr) outputs_.update(entry.item, offset, bytes);
  });
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

void LoadDigests::add_entries(std::uint32_t number) {
  const PlannedTarget& target = plan_.targets[number];
  first_entry_[number] = entries_.size();
  const auto add = [&](ReceiptTensor tensor, std::size_t part) {
    std::vector<ByteRange> all;
    if (tensor.end > 0) all.push_back({0, tensor.end});
    const std::uint32_t item = outputs_.add(std::move(all));
    entries_.push_back({std::move(tensor), number, part, item, whole_copy(plan_, target)});
  };
  if (!target.quantization) {
    add(entry_of(target, Encoding(target.dtype), target.shape, target.byte_count()), 0);
    return;
  }
  std::size_t part = 0;
  for (const QuantizedPart& each :
       quantized_parts(*target.quantization, target.shape, target.dtype)) {
    ReceiptTensor tensor = entry_of(target, Encoding(each.dtype), each.shape, each.byte_count());
    tensor.component = each.name;
    tensor.codec = target.quantization->encoding;
    tensor.recipe = "encode";
    add(std::move(tensor), part++);
  }
}

// A view of a part of a file has no memory here, and gets no digest.
void LoadDigests::complete(Entry& entry) {
  const std::string* const known =
      entry.copied == nullptr ? nullptr : sources_.whole_digest(0, entry.copied->source);
  if (known != nullptr) {
    entry.tensor.digest = *known;
  } else if (entry.tensor.end == 0 || sink_.has_memory(entry.target, entry.part)) {
    outputs_.complete(entry.item, [&](std::uint64_t begin, std::span<std::byte> to) {
      sink_.read(entry.target, entry.part, begin, to);
    });
    entry.tensor.digest = outputs_.digest(entry.item);
  }
}

std::shared_ptr<const Receipt> LoadDigests::finish(unsigned threads) {
  sources_.complete(0);
  Receipt receipt = {
      .kind = outputs_.kind(), .program = LOADSTONE_VERSION, .sources = sources_.files(0)};
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> stop = false;
  run_team(
      threads, stop, nullptr, [] { return Progress{}; },
      [&] {
        for (std::size_t i = next++; i < entries_.size() && !stop; i = next++) {
          complete(entries_[i]);
        }
      });
  for (Entry& entry : entries_) {
    if (!entry.tensor.digest.empty()) receipt.targets.push_back(std::move(entry.tensor));
  }
  return std::make_shared<const Receipt>(std::move(receipt));
}

}  // namespace loadstone
