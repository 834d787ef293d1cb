#include "load/load_receipt.h"

#include <utility>

#include "engine/jobs.h"
#include "plan/costs.h"
#include "plan/origins.h"
#include "receipt/configs.h"

namespace loadstone {

LoadReceipt::LoadReceipt(const Plan& plan, const ValueSet& values, const OpenShards& shards,
                         MemorySink& sink, DigestKind kind)
    : ReceiptRecorder(values, shards, kind, 1, DigestTable::waiting_bytes_default),
      catalog_(values.catalog),
      sink_(sink),
      first_output_(plan.targets.size(), SIZE_MAX) {
  for (std::uint32_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (!is_delivered(target.recipe.origin) || target.delivery == Delivery::none ||
        (target.delivery == Delivery::memory && !sink.has_memory(i, 0))) {
      continue;
    }
    need(0, values[i]);
    add_outputs(plan, i);
  }
  prepare();
  sink.watch([this](std::uint32_t target, std::size_t part, std::uint64_t offset,
                    std::span<const std::byte> bytes) {
    if (first_output_[target] != SIZE_MAX) wrote(0, first_output_[target] + part, offset, bytes);
  });
}

void LoadReceipt::add_outputs(const Plan& plan, std::uint32_t number) {
  const PlannedTarget& target = plan.targets[number];
  first_output_[number] = outputs_.size();
  const auto add_part = [&](std::size_t part, const QuantizedPart* quantized) {
    ReceiptTensor tensor = planned_tensor(plan, target, quantized);
    std::optional<std::uint32_t> copied;
    if (tensor.end > 0 && is_whole_source(plan, target)) copied = target.recipe.boxes[0].source;
    // A view of a part of a file has no memory in this load, so it gets no digest.
    if (tensor.end > 0 && !copied && !sink_.has_memory(number, part)) return;
    add(0, tensor.end, copied);
    outputs_.push_back(std::move(tensor));
    parts_.emplace_back(number, part);
  };
  if (!target.quantization) return add_part(0, nullptr);
  const auto parts = quantized_parts(*target.quantization, target.shape, target.dtype);
  for (std::size_t part = 0; part < parts.size(); ++part) add_part(part, &parts[part]);
}

std::shared_ptr<const Receipt> LoadReceipt::finish(Storage& storage, unsigned threads,
                                                   Observer* observer, std::uint64_t bytes_done) {
  Jobs jobs(threads, observer, bytes_done + bytes_left(0), bytes_done);
  const auto goes_on = [&](std::uint64_t bytes) { return jobs.goes_on(bytes); };
  const auto read = [&](std::size_t output, std::uint64_t begin, std::span<std::byte> to) {
    sink_.read(parts_[output].first, parts_[output].second, begin, to);
  };
  jobs.run(step_count(0),
           [&](std::size_t step, std::vector<std::byte>&) { complete(0, step, read, goes_on); });
  Receipt receipt = receipt_of(0, outputs_);
  add_configs(receipt, catalog_, storage);
  receipt.targets = std::move(outputs_);
  return std::make_shared<const Receipt>(std::move(receipt));
}

}  // namespace loadstone
