#include "loadstone/execute.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "base/thread_count.h"
#include "boxes/sources.h"
#include "catalog/open_shards.h"
#include "catalog/reading_threads.h"
#include "engine/run.h"
#include "load/load_receipt.h"
#include "load/memory_sink.h"
#include "load/report.h"
#include "load/tie_values.h"
#include "loadstone/error.h"
#include "offload/offload_folder.h"
#include "plan/values.h"

namespace loadstone {

namespace {

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
    refuse_destination(&target, "the components of a quantized target need separate memory");
  }
  if (target.delivery != Delivery::memory || destination.parts.empty()) return;
  const auto parts = quantized_parts(*target.quantization, target.shape, target.dtype);
  if (parts.size() != destination.parts.size()) {
    refuse_destination(&target, "a destination is needed for each component",
                       std::to_string(destination.parts.size()), std::to_string(parts.size()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::span<std::byte> memory = destination.parts[i];
    const bool is_there = memory.data() != nullptr || memory.empty();
    if (is_there && memory.size() == parts[i].byte_count()) continue;
    refuse_destination(
        &target,
        "the size of the destination differs from the size of the component " + parts[i].name,
        std::to_string(memory.size()) + " bytes", std::to_string(parts[i].byte_count()) + " bytes");
  }
}

// Rejects memory that no load would fill: a tie has the memory of the target that it is tied to.
void check_ties(const Plan& plan, std::span<const Destination> destinations) {
  std::map<std::string_view, const std::byte*> memory;
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    memory.emplace(plan.targets[i].name, destinations[i].data);
  }
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.recipe.origin != Origin::tie || destinations[i].data == nullptr) continue;
    const auto root = memory.find(target.recipe.tie_of);
    if (root == memory.end() || root->second == destinations[i].data) continue;
    refuse_destination(&target,
                       "the destination of a tied target must be null, or the memory of '" +
                           printable(target.recipe.tie_of) + "', to which it is tied");
  }
}

void check_destinations(const Plan& plan, std::span<const Destination> destinations) {
  if (destinations.size() != plan.targets.size()) {
    refuse_destination(nullptr, "a destination is needed for each target of the plan",
                       std::to_string(destinations.size()), std::to_string(plan.targets.size()));
  }
  check_ties(plan, destinations);
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    const Destination& destination = destinations[i];
    if (destination.kind == MemoryKind::device && !value_of(target).goes_to_device()) {
      refuse_destination(&target, "the plan places this target in host memory", "device memory",
                         "host memory");
    }
    if (target.quantization) check_parts(target, destination);
    if (target.delivery != Delivery::memory || destination.data == nullptr) continue;
    if (destination.byte_count != target.byte_count()) {
      refuse_destination(&target, "the sizes of the destination and the target differ",
                         std::to_string(destination.byte_count) + " bytes",
                         std::to_string(target.byte_count()) + " bytes");
    }
    if (destination.dtype != target.dtype) {
      refuse_destination(&target, "the destination has a different dtype than the target",
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

// Opens only the shards that the plan reads or refers to, and the shards for which the receipt has
// a digest.
OpenShards open_needed(const Plan& plan, const ValueSet& values,
                       std::span<const Destination> destinations, bool has_receipt,
                       Storage* storage) {
  std::vector<std::uint32_t> needed;
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    const bool has_memory = destinations[i].data != nullptr || !destinations[i].parts.empty();
    const bool skipped =
        target.delivery == Delivery::none || (target.delivery == Delivery::memory && !has_memory);
    if (skipped) continue;
    std::ranges::copy(sources_of(target.recipe, plan.decodings), std::back_inserter(needed));
    if (!has_receipt) continue;
    std::ranges::copy(deciding_tensors(values, values[i]), std::back_inserter(needed));
  }
  return {*plan.catalog, storage, needed};
}

// Returns the number of readers that the caller requested, or a growing number that starts small.
ReaderGrowth growth_of(const Catalog& catalog, unsigned most, const ExecuteOptions& options) {
  const unsigned first = options.threads != 0 ? most : first_readers(catalog, most);
  return {first, most, thread_count(0, defaults::threads_most)};
}

// Completes the report, which already has the findings about ties.
void fill_report(const Plan& plan, const MemorySink& sink, RunReport& done, Report& report) {
  for (const std::uint32_t i : sink.by_windows()) {
    if (sink.has_written(i)) done.written[i] = plan.targets[i].byte_count();
  }
  report.provenance = make_provenance(plan, [&](std::size_t i) { return done.written[i]; });
  report.findings.insert(report.findings.end(), plan.findings.begin(), plan.findings.end());
  std::ranges::move(done.findings, std::back_inserter(report.findings));
  sort_findings(report.findings);
  report.bytes_read += done.bytes_read;
  for (const std::uint64_t bytes : done.written) report.bytes_written += bytes;
  report.bytes_read_ahead = done.bytes_read_ahead;
  report.readers = done.readers;
  report.is_interleaved = done.is_interleaved;
}

}  // namespace

static Report load(const Plan& plan, std::span<const Destination> destinations,
                   const ExecuteOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  require_ok(plan);
  check_constants(plan);
  check_destinations(plan, destinations);
  Storage& storage = plan.catalog->storage(options.storage);
  const ValueSet values = values_of(plan);
  const std::vector<PreparedDecoder> forms = prepare_decodings(values);
  check_claims(*plan.catalog, storage);
  Report report;
  report.bytes_read = compare_ties(plan, storage, report.findings, options.observer);
  const Budget budget =
      limits_of(plan, values)
          .load_budget(promise_of(plan),
                       options.threads != 0 ? thread_count(options.threads, 1) : plan.threads,
                       std::max<std::uint64_t>(options.chunk_bytes, element_bytes_max));
  const OpenShards shards =
      open_needed(plan, values, destinations, options.receipt.has_value(), &storage);
  const auto offload = std::make_shared<OffloadFolder>(plan, storage, options.own_offload_file);
  MemoryCount memory;
  MemorySink sink(plan, values, destinations, *offload, options, budget, memory);
  GroupList groups;
  append_groups(values, sink.by_windows(), groups);
  std::optional<LoadReceipt> receipt;
  if (options.receipt) receipt.emplace(plan, values, shards, sink, *options.receipt);
  RunReport done = run({.values = values,
                        .shards = receipt ? receipt->sources() : shards.sources(),
                        .budget = budget,
                        .whole = sink.whole(),
                        .forms = forms,
                        .groups = groups,
                        .sink = sink,
                        .memory = memory,
                        .observer = options.observer,
                        .read_ahead_bytes = options.read_ahead_bytes,
                        .is_fresh = !options.has_pages,
                        .interleaves = options.interleave},
                       growth_of(*plan.catalog, budget.threads, options));
  sink.complete();
  if (receipt)
    report.receipt = receipt->finish(storage, budget.threads, options.observer, done.bytes_done);
  // Throws if a file changed during the load, because the loaded values may then be wrong.
  shards.require_unchanged();
  fill_report(plan, sink, done, report);
  report.staging_bytes_peak = memory.bytes_peak();
  if (!options.holds_offload) offload->commit();  // last, because nothing can fail after it
  report.sync_seconds = offload->sync_seconds();
  if (options.holds_offload) report.offload = offload;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

Report execute(const Plan& plan, std::span<const Destination> destinations,
               const ExecuteOptions& options) {
  return only_errors([&] { return load(plan, destinations, options); });
}

}  // namespace loadstone
