#include "cli/duration.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json_writer.h"
#include "base/text.h"
#include "cli/output.h"
#include "loadstone/error.h"
#include "loadstone/storage.h"
#include "storage/rates.h"

namespace loadstone::cli {

namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Returns the user's cache folder, or an empty path if the environment does not name it.
std::string cache_folder() {
  const std::string cache = environment("XDG_CACHE_HOME");
  const std::string home = environment("HOME");
  return !cache.empty() || home.empty() ? cache : home + "/.cache";
}

std::string rates_file(const std::string& cache) {
  return cache.empty() ? "" : cache + "/loadstone/bench.json";
}

}  // namespace

std::string save_rates(const BenchFigures& figures, const std::string& read_path,
                       const std::string& write_folder) {
  constexpr std::string_view unsaved =
      "the rates could not be saved in the cache folder, so plans show no duration";
  const std::string cache = cache_folder();
  if (cache.empty()) return std::string(unsaved);
  std::vector<Rate> rates;
  const auto add = [&](const std::string& path, const Series& series, bool is_write, bool is_disk) {
    const auto median = static_cast<std::uint64_t>(series.median());
    rates.push_back(rate_of_today(path, is_write, is_disk, median));
  };
  const bool is_disk = !figures.load_from_disk.series.seconds.empty();
  const LoadSeries& load = is_disk ? figures.load_from_disk : figures.load_from_page_cache;
  const bool is_enough = figures.sample_bytes >= kept_bytes_min;
  if (is_enough) add(read_path, load.series, false, is_disk);
  if (!figures.write.seconds.empty()) add(write_folder, figures.write, true, true);
  for (const auto& [encoding, series] : figures.encode) {
    const auto median = static_cast<std::uint64_t>(series.median());
    rates.push_back(encoding_rate_of_today(encoding, median));
  }
  try {
    WritableStorage& storage = local_storage().writable();
    static_cast<void>(storage.try_make_folder(cache));
    static_cast<void>(storage.try_make_folder(cache + "/loadstone"));
    loadstone::save_rates(rates, rates_file(cache));
  } catch (const Error&) {
    return std::string(unsaved);
  }
  if (is_enough) return {};
  return fmt::format("the rate of reads is not saved, because {} are too few: measure at least {}",
                     human_bytes(figures.sample_bytes), exact_bytes(kept_bytes_min));
}

Duration duration_of(const Plan& plan) {
  return loadstone::duration_of(plan,
                                {plan.bytes_to_read, plan.bytes_to_write, plan.offload_folder},
                                rates_file(cache_folder()));
}

Duration duration_of(const Conversion& conversion, const WorkLeft& left,
                     const std::string& target) {
  const auto total = static_cast<double>(std::max<std::uint64_t>(conversion.bytes_to_write, 1));
  const double share = static_cast<double>(left.bytes_to_write) / total;
  return loadstone::duration_of(conversion.plan,
                                {left.bytes_to_read, left.bytes_to_write, target, share},
                                rates_file(cache_folder()));
}

std::string duration_line(const Duration& duration) {
  return "duration  " + duration.text() + '\n';
}

std::string with_duration(const Duration& duration, const std::string& json) {
  JsonWriter writer(2);
  writer.begin_object();
  writer.key("duration");
  writer.begin_object();
  writer.member("seconds", duration.seconds);
  writer.member("excludes_computing", !duration.excluded.empty());
  writer.member("text", duration.text());
  writer.end_object();
  return joined(std::move(writer), json);
}

}  // namespace loadstone::cli
