#include "loadstone/execute.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "codec/tensor_table.h"
#include "execute/job_queue.h"
#include "execute/offload_folder.h"
#include "execute/quantizer.h"
#include "execute/reader.h"
#include "execute/report.h"
#include "execute/shard_files.h"
#include "execute/staging.h"
#include "execute/team.h"
#include "loadstone/error.h"
#include "plan/costs.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

// More readers are not worth slots smaller than this.
constexpr std::uint64_t slot_bytes_wanted = 64 << 10;
constexpr std::uint64_t known_bytes_at_once = 4 << 20;

[[noreturn]] void refuse_destination(const PlannedTarget* target, std::string message,
                                     std::string found = {}, std::string expected = {}) {
  Where where;
  if (target != nullptr) where.tensor = target->name;
  where.found = std::move(found);
  where.expected = std::move(expected);
  throw Error("plan.destination", std::move(message), std::move(where));
}

void check_parts(const PlannedTarget& target, const Destination& destination) {
  if (destination.data != nullptr) {
    refuse_destination(&target, "the parts of a quantized target have memory of their own");
  }
  if (target.delivery != Delivery::memory || destination.parts.empty()) return;
  const auto parts = quantized_parts(*target.quantization, target.shape, target.dtype);
  if (parts.size() != destination.parts.size()) {
    refuse_destination(&target, "one destination for each part is needed",
                       std::to_string(destination.parts.size()), std::to_string(parts.size()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::span<std::byte> memory = destination.parts[i];
    const bool is_there = memory.data() != nullptr || memory.empty();
    if (is_there && memory.size() == parts[i].byte_count()) continue;
    refuse_destination(&target, "the destination is not as large as the part " + parts[i].name,
                       std::to_string(memory.size()) + " bytes",
                       std::to_string(parts[i].byte_count()) + " bytes");
  }
}

void check_destinations(const Plan& plan, std::span<const Destination> destinations) {
  if (destinations.size() != plan.targets.size()) {
    refuse_destination(nullptr, "one destination for each target of the plan is needed",
                       std::to_string(destinations.size()), std::to_string(plan.targets.size()));
  }
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    const Destination& destination = destinations[i];
    if (target.quantization) check_parts(target, destination);
    if (target.delivery != Delivery::memory || destination.data == nullptr) continue;
    if (destination.byte_count != target.byte_count()) {
      refuse_destination(&target, "the destination is not as large as the target",
                         std::to_string(destination.byte_count) + " bytes",
                         std::to_string(target.byte_count()) + " bytes");
    }
    if (destination.dtype != target.dtype) {
      refuse_destination(&target, "the destination has another dtype than the target",
                         std::string(name(destination.dtype)), std::string(name(target.dtype)));
    }
  }
}

void check_constants(const Plan& plan) {
  for (const PlannedTarget& target : plan.targets) {
    const bool has_constant = target.recipe.constant != nullptr;
    if (has_constant == (target.recipe.origin == Origin::constant) &&
        (!has_constant || target.recipe.constant->size() == target.byte_count())) {
      continue;
    }
    throw Error("plan.box", "the constant does not fit its target", {.tensor = target.name});
  }
}

// The shards whose bytes the plan reads or points at, and no others.
OpenShards open_needed(const Plan& plan, std::span<const Destination> destinations,
                       Storage* storage) {
  std::vector<bool> needed(plan.catalog->shards().size(), false);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    const bool has_memory = destinations[i].data != nullptr || !destinations[i].parts.empty();
    const bool skipped =
        target.delivery == Delivery::none || (target.delivery == Delivery::memory && !has_memory);
    if (!skipped) add_needed(plan, target, needed);
  }
  return {*plan.catalog, storage, needed};
}

// The last place before memory is written: see check_box().
std::vector<DecodeForm> prepare_decodings(const Plan& plan) {
  std::vector<DecodeForm> forms(plan.decodings.size());
  for (std::size_t i = 0; i < forms.size(); ++i) {
    const auto problem = check_decoding(plan.catalog->tensors(), plan.decodings[i], forms[i]);
    if (!problem) continue;
    throw Error("plan.box", problem->message,
                {.field = "decodings", .found = problem->found, .expected = problem->expected});
  }
  return forms;
}

// How many readers, and how much each looks at in one go.
struct Sizes {
  unsigned threads = 1;
  std::uint64_t chunk_bytes = 0;
  std::uint64_t slot_bytes = 0;
  WindowLimits limits;
};

// The smallest slot: one element, and where it is decoded what it is made of beside it.
std::uint64_t slot_bytes_least(const Plan& plan, std::span<const DecodeForm> forms) {
  const auto& tensors = plan.catalog->tensors();
  std::uint64_t least = 1;
  for (const PlannedTarget& target : plan.targets) {
    for (const Box& box : target.recipe.boxes) {
      if (box.decoding != no_decoding || box.source >= tensors.size()) continue;
      const Encoding encoding = tensors[box.source].encoding;
      if (encoding.is_dtype())
        least = std::max<std::uint64_t>(least, element_bytes(encoding.dtype()));
    }
  }
  for (const DecodeForm& form : forms) {
    least = std::max<std::uint64_t>(least, decoding_bytes_least(form));
  }
  return least;
}

Sizes choose_sizes(const Plan& plan, std::span<const DecodeForm> forms,
                   const ExecuteOptions& options) {
  Sizes sizes;
  sizes.threads = thread_count(options.threads);
  const std::uint64_t least = std::max(slot_bytes_least(plan, forms), quantizing_bytes_least(plan));
  const std::uint64_t staging = std::max(plan.staging_bytes_max, least);
  const std::uint64_t slots =
      std::clamp<std::uint64_t>(staging / std::max(slot_bytes_wanted, least), 1, sizes.threads);
  sizes.threads = static_cast<unsigned>(slots);
  sizes.chunk_bytes = std::max<std::uint64_t>(options.chunk_bytes, element_bytes_max);
  // A transposed box may fill two chunks, to have longer runs in the target.
  sizes.slot_bytes =
      std::max(std::min(staging / slots, 2 * std::min(sizes.chunk_bytes, staging)), least);
  sizes.limits = window_limits(sizes.slot_bytes, sizes.chunk_bytes);
  return sizes;
}

// The values that need no file.
void write_known_values(ReadContext& context, std::atomic<std::size_t>& next_target) {
  const auto& targets = context.plan.targets;
  for (std::size_t i = next_target++; i < targets.size(); i = next_target++) {
    const PlannedTarget& target = targets[i];
    std::byte* const data = context.targets[i];
    const Constant& constant = target.recipe.constant;
    if (data == nullptr || (target.recipe.origin != Origin::zeros && constant == nullptr)) continue;
    const std::uint64_t total = target.byte_count();
    for (std::uint64_t done = 0; done < total && !context.stop; done += known_bytes_at_once) {
      const std::uint64_t count = std::min(known_bytes_at_once, total - done);
      if (constant != nullptr) {
        std::memcpy(data + done, constant->data() + done, count);
      } else {
        std::memset(data + done, 0, count);
      }
      context.written[i] += count;
    }
  }
}

// Ends with the reader's slot given back.
void run_jobs(ReadContext& context, JobQueue& queue) {
  Reader reader(context);
  Job job;
  while (!context.stop && queue.next(job)) reader.run(job);
}

// Where each target's value is written to; null where nothing is written.
std::vector<std::byte*> target_memory(const Plan& plan, std::span<const Destination> destinations,
                                      const OffloadFolder& folder) {
  std::vector<std::byte*> memory(plan.targets.size(), nullptr);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (plan.targets[i].quantization) continue;
    if (plan.targets[i].delivery == Delivery::memory) memory[i] = destinations[i].data;
    if (plan.targets[i].delivery == Delivery::disk_write) memory[i] = folder.data(i);
  }
  return memory;
}

// The same for the parts of quantized targets; empty where nothing is written.
std::vector<Quantizer::Parts> part_memory(const Plan& plan,
                                          std::span<const Destination> destinations,
                                          const OffloadFolder& folder) {
  std::vector<Quantizer::Parts> memory(plan.targets.size());
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (!target.quantization) continue;
    if (target.delivery == Delivery::disk_write) memory[i] = folder.parts(i);
    if (target.delivery != Delivery::memory) continue;
    for (const auto& part : destinations[i].parts) memory[i].push_back(part.data());
  }
  return memory;
}

}  // namespace

Report execute(const Plan& plan, std::span<const Destination> destinations,
               const ExecuteOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  require_ok(plan);
  check_constants(plan);
  check_destinations(plan, destinations);
  Storage& storage = plan.catalog->storage(options.storage);
  const std::vector<DecodeForm> forms = prepare_decodings(plan);
  const Sizes sizes = choose_sizes(plan, forms, options);
  const OpenShards shards = open_needed(plan, destinations, &storage);
  const auto offload = std::make_shared<OffloadFolder>(plan, storage);
  const OffloadFolder& folder = *offload;
  const std::vector<std::byte*> memory = target_memory(plan, destinations, folder);
  JobQueue queue(plan, memory, sizes.limits);
  const std::vector<Quantizer::Parts> parts = part_memory(plan, destinations, folder);
  Quantizer quantizer(plan, parts, sizes.slot_bytes);

  StagingRing staging(sizes.slot_bytes);
  std::atomic<bool> stop = false;
  ReadContext context = {.plan = plan,
                         .targets = memory,
                         .shards = shards.sources(),
                         .forms = forms,
                         .chunk_bytes = sizes.chunk_bytes,
                         .decoded_bytes = sizes.limits.decoded_bytes,
                         .staging = staging,
                         .stop = stop,
                         .written = std::vector<std::atomic<std::uint64_t>>(plan.targets.size())};
  std::atomic<std::size_t> next_target = 0;
  const auto progress = [&] {
    return Progress{.bytes_done = context.bytes_done + quantizer.bytes_done(),
                    .bytes_total = queue.bytes_total() + quantizer.bytes_total()};
  };
  run_team(sizes.threads, stop, options.observer, progress, [&] {
    run_jobs(context, queue);
    write_known_values(context, next_target);
    quantizer.run(shards.sources(), stop);
  });
  // A file that changed meanwhile is not handed out as good.
  shards.require_unchanged();
  if (!options.holds_offload) offload->commit();

  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].empty()) context.written[i] = plan.targets[i].byte_count();
  }
  Report report;
  report.provenance =
      make_provenance(plan, [&](std::size_t i) { return context.written[i].load(); });
  report.sync_seconds = offload->sync_seconds();
  if (options.holds_offload) report.offload = offload;
  report.findings = plan.findings;
  std::ranges::move(quantizer.findings(), std::back_inserter(report.findings));
  sort_findings(report.findings);
  report.bytes_read = context.bytes_read + quantizer.bytes_read();
  for (const auto& bytes : context.written) report.bytes_written += bytes;
  report.staging_bytes_peak = std::max(staging.bytes_peak(), quantizer.staging_bytes_peak());
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace loadstone
