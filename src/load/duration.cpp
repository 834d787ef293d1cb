#include "load/duration.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "storage/rates.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

std::string rate_text(const Rate& rate) {
  const std::string what = !rate.encoding.empty() ? "of BF16 encoded to " + printable(rate.encoding)
                           : rate.is_write        ? "written"
                           : rate.is_disk         ? "read from the disk"
                                                  : "read from the page cache";
  return fmt::format("{}/s {} on {}", human_bytes(rate.bytes_per_second), what,
                     printable(rate.date));
}

double seconds_for(std::uint64_t bytes, const Rate* rate) {
  return bytes == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(rate->bytes_per_second);
}

// Returns the bytes of the values in BF16, by the encoding that they are encoded to.
std::map<std::string, std::uint64_t> bytes_to_encode(const Plan& plan) {
  std::map<std::string, std::uint64_t> bytes;
  for (const PlannedTarget& target : plan.targets) {
    if (!target.quantization) continue;
    const std::uint64_t elements = target.shape.numel().value_or(0);
    bytes[target.quantization->encoding] += elements * element_bytes(Dtype::bf16);
  }
  return bytes;
}

// Returns the option with which `loadstone bench` measures these encodings, with a leading space.
std::string encode_options(const std::vector<std::string>& encodings) {
  std::string text;
  for (const std::string& each : encodings) text += " --quantize " + printable(each);
  return text;
}

std::string excluded_text(const Plan& plan, const std::vector<std::string>& encodings) {
  const std::string encode =
      encodings.empty() ? ""
                        : fmt::format("to encode to {} (run 'loadstone bench CHECKPOINT{}')",
                                      fmt::join(encodings, ", "), encode_options(encodings));
  if (plan.decodings.empty()) return encode;
  return encode.empty() ? "to decode values" : "to decode values and " + encode;
}

}  // namespace

std::string Duration::text() const {
  if (!seconds) return "unknown: " + reason;
  const std::string time =
      *seconds < 1 ? "less than 1 s" : fmt::format("about {}", time_text(*seconds));
  return fmt::format("{}{} ({})", time, excluded.empty() ? "" : ", plus the time " + excluded,
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
  const auto encoded = bytes_to_encode(plan);
  std::vector<std::string> unmeasured;
  for (const auto& [encoding, bytes] : encoded) {
    if (rates.find_encoding(encoding) == nullptr) unmeasured.push_back(encoding);
  }
  if (read == nullptr || lacks_write) {
    return {.reason =
                fmt::format("run 'loadstone bench CHECKPOINT{}{}'",
                            lacks_write ? " --write FOLDER" : "", encode_options(unmeasured))};
  }
  double seconds = seconds_for(work.bytes_to_read, read) + seconds_for(work.bytes_to_write, write);
  std::string measured = rate_text(*read);
  if (writes) measured += ", " + rate_text(*write);
  for (const auto& [encoding, bytes] : encoded) {
    const Rate* const rate = rates.find_encoding(encoding);
    if (rate == nullptr) continue;
    seconds += work.encoded_share * seconds_for(bytes, rate);
    measured += ", " + rate_text(*rate);
  }
  return {.seconds = seconds,
          .excluded = excluded_text(plan, unmeasured),
          .reason = "measured by 'loadstone bench': " + measured};
}

}  // namespace loadstone
