#include "cli/duration.h"

#include <cstdlib>
#include <utility>

#include "base/json_writer.h"
#include "cli/output.h"
#include "loadstone/error.h"
#include "loadstone/storage.h"

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

bool save_rates(const BenchFigures& figures) {
  const std::string cache = cache_folder();
  if (cache.empty()) return false;
  const auto rate = [](const Series& series) {
    return static_cast<std::uint64_t>(series.median());
  };
  Rates rates = rates_of_this_machine();
  rates.is_disk = !figures.load_from_disk.series.seconds.empty();
  rates.read = rate((rates.is_disk ? figures.load_from_disk : figures.load_from_page_cache).series);
  rates.write = rate(figures.write);
  try {
    WritableStorage& storage = local_storage().writable();
    static_cast<void>(storage.try_make_folder(cache));
    static_cast<void>(storage.try_make_folder(cache + "/loadstone"));
    loadstone::save_rates(rates, rates_file(cache));
    return true;
  } catch (const Error&) {
    return false;
  }
}

Duration duration_of(const Plan& plan) {
  return loadstone::duration_of(plan, plan.bytes_to_read, plan.bytes_to_write,
                                rates_file(cache_folder()));
}

Duration duration_of(const Conversion& conversion) {
  return loadstone::duration_of(conversion.plan, conversion.bytes_to_read,
                                conversion.bytes_to_write, rates_file(cache_folder()));
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
  writer.member("is_lower_bound", duration.is_least);
  writer.member("text", duration.text());
  writer.end_object();
  return joined(std::move(writer), json);
}

}  // namespace loadstone::cli
