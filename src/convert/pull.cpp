#include "convert/pull.h"

#include <algorithm>
#include <atomic>

#include "engine/planned_reads.h"
#include "engine/puller.h"
#include "engine/read_ahead.h"
#include "engine/team.h"
#include "engine/windows.h"
#include "plan/decodings.h"

namespace loadstone {

// What the wanted files are made of. What is quantized may share scales with tensors of other
// files.
OpenShards open_needed(const Conversion& conversion, const std::vector<bool>& wanted,
                       Storage* storage) {
  const Plan& plan = conversion.plan;
  check_claims(*plan.catalog, plan.catalog->storage(storage));
  std::vector<bool> needed(plan.catalog->shards().size(), false);
  const bool shares = std::ranges::count(wanted, true) > 0 &&
                      std::ranges::any_of(plan.targets, [](const PlannedTarget& target) {
                        return target.quantization.has_value();
                      });
  for (std::size_t i = 0; i < conversion.files.size(); ++i) {
    if (!wanted[i] && !shares) continue;
    for (const OutputTensor& tensor : conversion.files[i].tensors) {
      add_needed(plan, plan.targets[tensor.target], needed);
    }
  }
  return {*plan.catalog, storage, needed};
}

PulledFiles pull_files(const Conversion& conversion, const OpenShards& shards, OutputSink& sink,
                       SourceDigests* digests, Observer* observer) {
  const GroupList groups = sink.groups();
  ReadAhead ahead(planned_reads(conversion.plan, groups.targets), shards.sources(),
                  defaults::read_ahead_bytes);
  MemoryCount memory;
  WindowQueue queue(conversion.plan, conversion.budget, groups, sink, memory);
  std::atomic<bool> stop = false;
  Overflows overflows;
  PullWork work = {.plan = conversion.plan,
                   .shards = ahead.sources(),
                   .budget = conversion.budget,
                   .sink = sink,
                   .queue = queue,
                   .memory = memory,
                   .stop = stop,
                   .overflows = overflows,
                   .refuses_casts = true,
                   .digests = digests};
  run_team(
      conversion.budget.threads, stop, observer,
      [&] { return Progress{.bytes_done = work.bytes_done, .bytes_total = queue.bytes_total()}; },
      [&] { pull_windows(work); });
  return {.bytes_read = work.bytes_read,
          .bytes_read_ahead = ahead.bytes_asked(),
          .memory_peak = memory.bytes_peak(),
          .findings = findings_of(work)};
}

}  // namespace loadstone
