#include "load/duration.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/text.h"
#include "storage/rates.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

std::string rate_text(const Rate& rate) {
  return fmt::format("{}/s {} on {}", human_bytes(rate.bytes_per_second),
                     rate.is_write  ? "written"
                     : rate.is_disk ? "read from the disk"
                                    : "read from the page cache",
                     printable(rate.date));
}

double seconds_for(std::uint64_t bytes, const Rate* rate) {
  return bytes == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(rate->bytes_per_second);
}

// Returns true if the work encodes or decodes values.
bool computes(const Plan& plan) {
  return !plan.decodings.empty() ||
         std::ranges::any_of(plan.targets, [](const PlannedTarget& target) {
           return target.quantization.has_value();
         });
}

}  // namespace

std::string Duration::text() const {
  if (!seconds) return "unknown: " + reason;
  const std::string time =
      *seconds < 1 ? "less than 1 s" : fmt::format("about {}", time_text(*seconds));
  return fmt::format("{}{} ({})", time,
                     excludes_computing ? ", plus the time to decode and encode values" : "",
                     reason);
}

Duration duration_of(const Plan& plan, const Work& work, const std::string& rates_file) {
  const std::vector<Shard>& shards = plan.catalog->shards();
  const auto is_elsewhere = [](const Shard& shard) { return is_remote(shard.path); };
  if (std::ranges::any_of(shards, is_elsewhere)) {
    return {.reason = "'loadstone bench' measures only files on this machine"};
  }
  const Rates rates = saved_rates(rates_file);
  const Rate* const read = rates.find(mount_of(shards.front().path), false);
  const bool writes = work.bytes_to_write > 0;
  const Rate* const write = writes ? rates.find(mount_of(work.write_path), true) : nullptr;
  const bool lacks_write = writes && write == nullptr;
  if (read == nullptr || lacks_write) {
    return {.reason = fmt::format("run 'loadstone bench CHECKPOINT{}'",
                                  lacks_write ? " --write FOLDER" : "")};
  }
  std::string measured = rate_text(*read);
  if (writes) measured += ", " + rate_text(*write);
  return {
      .seconds = seconds_for(work.bytes_to_read, read) + seconds_for(work.bytes_to_write, write),
      .excludes_computing = computes(plan),
      .reason = "measured by 'loadstone bench': " + measured};
}

}  // namespace loadstone
