// Doing what a conversion says: a team of pullers, and what comes before and after them.
#include "loadstone/convert.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "convert/output.h"
#include "convert/puller.h"
#include "convert/windows.h"
#include "execute/shard_files.h"
#include "execute/team.h"
#include "loadstone/error.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

using Sources = std::vector<std::shared_ptr<ByteSource>>;

Sources open_needed(const Plan& plan, Storage& storage) {
  std::vector<bool> needed(plan.catalog->shards().size(), false);
  for (const PlannedTarget& target : plan.targets) {
    for (const std::uint32_t source : sources_of(target.recipe.boxes, plan.decodings)) {
      needed.at(plan.catalog->tensors().at(source).shard) = true;
    }
  }
  return open_shards(*plan.catalog, needed, storage);
}

}  // namespace

ConvertReport convert(const Conversion& conversion, const std::string& target, Observer* observer,
                      Storage* storage) {
  const auto begin = std::chrono::steady_clock::now();
  require_ok(conversion.plan);
  check_target(conversion, target);
  const Sources sources =
      open_needed(conversion.plan, storage != nullptr ? *storage : local_storage());
  Output output(conversion, look_at_target(conversion, target));
  WindowQueue queue(conversion);
  std::atomic<bool> stop = false;
  Work work = {
      .conversion = conversion, .sources = sources, .output = output, .queue = queue, .stop = stop};
  std::uint64_t bytes_total = 0;
  for (const OutputFile& file : conversion.files) bytes_total += file.data_bytes;
  {
    Team team(stop);  // last, so that it is the first to go
    team.start(conversion.threads, [&] { Puller(work).run(); });
    const bool wanted = team.wait([&] {
      return observer == nullptr ||
             observer->on_progress({.bytes_done = work.bytes_done, .bytes_total = bytes_total});
    });
    if (!wanted) throw Error("cancelled", "the conversion was stopped by its caller");
  }
  // What was made of a file that changed meanwhile is not handed out as good.
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i]) check_identity(conversion.plan.catalog->shards()[i], *sources[i]);
  }
  ConvertReport report;
  report.outputs = output.commit();
  report.findings = conversion.plan.findings;
  report.bytes_read = work.bytes_read;
  report.bytes_written = output.bytes_written();
  const std::uint64_t planned =
      conversion.threads * (conversion.window_bytes + conversion.staging_bytes);
  report.peak_bytes =
      conversion.peak_bytes - planned + std::min(planned, work.staging_bytes.load());
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace loadstone
