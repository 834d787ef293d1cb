#include "loadstone/execute.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "base/only_errors.h"
#include "base/thread_count.h"
#include "catalog/open_shards.h"
#include "catalog/reading_threads.h"
#include "codec/tensor_table.h"
#include "engine/interleave.h"
#include "engine/job_queue.h"
#include "engine/memory_count.h"
#include "engine/planned_reads.h"
#include "engine/puller.h"
#include "engine/read_ahead.h"
#include "engine/reader.h"
#include "engine/reader_growth.h"
#include "engine/team.h"
#include "engine/windows.h"
#include "load/load_digests.h"
#include "load/memory_sink.h"
#include "load/report.h"
#include "load/tie_values.h"
#include "loadstone/error.h"
#include "offload/offload_folder.h"
#include "plan/budget.h"
#include "plan/decodings.h"

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
    if (destination.kind == MemoryKind::device && !goes_to_device(target)) {
      refuse_destination(&target, "the plan has this target in the memory of the host",
                         "device memory", "host memory");
    }
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

// Those that this run makes: a plan may be carried out in parts.
std::vector<std::uint32_t> targets_of(const MemorySink& sink, const GroupList& groups) {
  std::vector<std::uint32_t> targets = groups.targets;
  for (std::uint32_t i = 0; i < sink.whole().size(); ++i) {
    if (sink.whole()[i] != nullptr) targets.push_back(i);
  }
  return targets;
}

// Ends with the reader's slot given back.
void run_jobs(ReadContext& context, JobQueue& queue) {
  Reader reader(context);
  Job job;
  while (!context.stop && queue.next(job)) reader.run(job);
}

// As many readers as the caller wants, or few at first.
ReaderGrowth growth_of(const Catalog& catalog, unsigned most, const ExecuteOptions& options) {
  const unsigned first = options.threads != 0 ? most : first_readers(catalog, most);
  return {first, most, thread_count(0, defaults::threads_most)};
}

// From the sums that the threads left. `report` has what the comparison of ties left.
void fill_report(const Plan& plan, const MemorySink& sink, ReadContext& context,
                 const PullWork& work, Report& report) {
  for (const std::uint32_t i : sink.by_windows()) {
    if (sink.has_written(i)) context.written[i] = plan.targets[i].byte_count();
  }
  report.provenance =
      make_provenance(plan, [&](std::size_t i) { return context.written[i].load(); });
  report.findings.insert(report.findings.end(), plan.findings.begin(), plan.findings.end());
  std::ranges::move(findings_of(work), std::back_inserter(report.findings));
  sort_findings(report.findings);
  report.bytes_read += context.bytes_read + work.bytes_read;
  for (const auto& bytes : context.written) report.bytes_written += bytes;
  report.staging_bytes_peak = context.memory.bytes_peak();
}

}  // namespace

static Budget budget_of(const Plan& plan, const Needs& needs, const ExecuteOptions& options) {
  return load_budget(plan, needs, options.threads != 0 ? options.threads : plan.threads,
                     std::max<std::uint64_t>(options.chunk_bytes, element_bytes_max));
}

static Report load(const Plan& plan, std::span<const Destination> destinations,
                   const ExecuteOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  require_ok(plan);
  check_constants(plan);
  check_destinations(plan, destinations);
  Storage& storage = plan.catalog->storage(options.storage);
  const std::vector<DecodeForm> forms = prepare_decodings(plan);
  check_claims(*plan.catalog, storage);
  Report report;
  report.bytes_read = compare_ties(plan, storage, report.findings, options.observer);
  const Needs needs(plan, SinkKind::memory);
  const Budget budget = budget_of(plan, needs, options);
  const OpenShards shards = open_needed(plan, destinations, &storage);
  const auto offload = std::make_shared<OffloadFolder>(plan, storage);
  MemoryCount memory;
  MemorySink sink(plan, destinations, *offload, options.device, budget, memory, options.begun);
  JobQueue jobs(plan, sink.whole(), window_limits(budget.whole.bytes, budget.chunk_bytes));
  GroupList groups;
  append_groups(plan, sink.by_windows(), groups);
  ReadAhead ahead(planned_reads(plan, targets_of(sink, groups)), shards.sources(),
                  options.read_ahead_bytes);
  std::optional<LoadDigests> digests;
  if (options.receipt) digests.emplace(plan, destinations, shards, *options.receipt);
  SourceDigests* const sources = digests ? &digests->sources() : nullptr;
  std::atomic<bool> stop = false;
  ReadContext context = {.plan = plan,
                         .targets = sink.whole(),
                         .shards = ahead.sources(),
                         .forms = forms,
                         .chunk_bytes = budget.chunk_bytes,
                         .slot_bytes = budget.whole.bytes,
                         .memory = memory,
                         .stop = stop,
                         .written = std::vector<std::atomic<std::uint64_t>>(plan.targets.size()),
                         .populates = !options.has_pages,
                         .digests = sources,
                         .begun = options.begun};
  WindowQueue windows(plan, budget, groups, sink, memory);
  PullWork work = {.plan = plan,
                   .shards = ahead.sources(),
                   .budget = budget,
                   .sink = sink,
                   .queue = windows,
                   .memory = memory,
                   .stop = stop,
                   .overflows = context.overflows,
                   .digests = sources};
  const std::uint64_t bytes_total = jobs.bytes_total() + windows.bytes_total();
  const auto progress = [&] { return Progress{context.bytes_done + work.bytes_done, bytes_total}; };
  ReaderGrowth growth = growth_of(*plan.catalog, budget.threads, options);
  std::atomic<bool> is_interleaved = options.interleave && !options.has_pages;
  run_team(growth, stop, options.observer, progress, [&] {
    if (options.interleave && !interleave_new_pages()) is_interleaved = false;
    run_jobs(context, jobs);
    pull_windows(work);
  });
  sink.complete();
  if (digests) report.receipt = digests->finish(destinations, sink, budget.threads);
  // A file that changed meanwhile is not handed out as good.
  shards.require_unchanged();
  if (!options.holds_offload) offload->commit();
  fill_report(plan, sink, context, work, report);
  report.sync_seconds = offload->sync_seconds();
  if (options.holds_offload) report.offload = offload;
  report.bytes_read_ahead = ahead.bytes_asked();
  report.readers = growth.readers();
  report.is_interleaved = is_interleaved;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

Report execute(const Plan& plan, std::span<const Destination> destinations,
               const ExecuteOptions& options) {
  return only_errors([&] { return load(plan, destinations, options); });
}

}  // namespace loadstone
