#include "cli/duration.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <string_view>
#include <utility>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "loadstone/error.h"
#include "loadstone/machine.h"
#include "loadstone/storage.h"
#include "storage/new_file.h"
#include "storage/remote_path.h"

namespace loadstone::cli {

namespace {

constexpr std::uint64_t rates_version = 1;
constexpr std::size_t rates_bytes_max = 64 << 10;
constexpr const char* rates_code = "usage";  // the code of parse errors, which are caught

std::string host_name() {
  std::array<char, 256> name = {};  // the last byte stays NUL
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// The rates of a machine in bytes per second, as bench.json has them.
struct Rates {
  std::string host;
  std::string processor;
  std::string date;      // "2026-11-30"
  bool is_disk = false;  // true: `read` is the rate of a load from the disk, else the page cache
  std::uint64_t read = 0;
  std::uint64_t write = 0;  // 0: not measured
};

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Rates> auto& rates) {
  visitor.member("host", rates.host);
  visitor.member("processor", rates.processor);
  visitor.member("date", rates.date);
  visitor.member("is_disk", rates.is_disk);
  visitor.member("read_bytes_per_second", rates.read);
  visitor.member("write_bytes_per_second", rates.write);
}

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

std::string rates_path(const std::string& cache) { return cache + "/loadstone/bench.json"; }

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm date = {};
  ::gmtime_r(&now, &date);
  return fmt::format("{:04}-{:02}-{:02}", date.tm_year + 1900, date.tm_mon + 1, date.tm_mday);
}

Rates parse_rates(const std::string& text) {
  const JsonDocument document(text, rates_code, rates_bytes_max);
  const JsonReader reader(rates_code);
  JsonObject fields(reader, document.root(), {});
  fields.require_version(rates_version);
  Rates rates;
  visit_fields(fields, rates);
  fields.done();
  return rates;
}

// Returns the rates of this machine; nullopt if the file is missing, damaged or of another machine.
std::optional<Rates> saved_rates() {
  const std::string cache = cache_folder();
  if (cache.empty()) return std::nullopt;
  try {
    const auto text = local_storage().writable().read_begin(rates_path(cache), rates_bytes_max);
    if (!text) return std::nullopt;
    Rates rates = parse_rates(*text);
    const bool is_here = rates.host == host_name() && rates.processor == processor_name();
    if (!is_here || rates.read == 0 || !is_utf8(rates.date)) return std::nullopt;
    return rates;
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string rate_text(std::uint64_t bytes_per_second, std::string_view what) {
  return fmt::format("{}/s {}", human_bytes(bytes_per_second), what);
}

double seconds_for(std::uint64_t bytes, std::uint64_t rate) {
  return bytes == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(rate);
}

Duration duration_at_rates(const Catalog& catalog, std::uint64_t bytes_to_read,
                           std::uint64_t bytes_to_write) {
  const auto is_elsewhere = [](const Shard& shard) { return is_remote(shard.path); };
  if (std::ranges::any_of(catalog.shards(), is_elsewhere)) {
    return {.reason = "'loadstone bench' measures only files on this machine"};
  }
  const std::optional<Rates> rates = saved_rates();
  if (!rates) return {.reason = "run 'loadstone bench CHECKPOINT'"};
  if (bytes_to_write > 0 && rates->write == 0) {
    return {.reason = "run 'loadstone bench CHECKPOINT --write FOLDER'"};
  }
  std::string measured =
      rate_text(rates->read, rates->is_disk ? "read from the disk" : "read from the page cache");
  if (bytes_to_write > 0) measured += ", " + rate_text(rates->write, "written");
  return {.seconds =
              seconds_for(bytes_to_read, rates->read) + seconds_for(bytes_to_write, rates->write),
          .reason = fmt::format("measured by 'loadstone bench' on {}: {}", printable(rates->date),
                                measured)};
}

// Returns true if the work encodes or decodes values.
bool computes(const Plan& plan) {
  return !plan.decodings.empty() ||
         std::ranges::any_of(plan.targets, [](const PlannedTarget& target) {
           return target.quantization.has_value();
         });
}

std::string duration_text(const Duration& duration) {
  if (!duration.seconds) return "unknown: " + duration.reason;
  const std::string time = *duration.seconds < 1
                               ? "less than 1 s"
                               : fmt::format("about {}", time_text(*duration.seconds));
  return fmt::format("{} ({})",
                     duration.is_least ? "at least " + time_text(*duration.seconds) : time,
                     duration.reason + (duration.is_least ? "; computing takes longer" : ""));
}

}  // namespace

bool save_rates(const BenchFigures& figures) {
  const std::string cache = cache_folder();
  if (cache.empty()) return false;
  const bool is_disk = !figures.load_from_disk.series.seconds.empty();
  const LoadSeries& load = is_disk ? figures.load_from_disk : figures.load_from_page_cache;
  const auto rate = [](const Series& series) {
    return static_cast<std::uint64_t>(series.median());
  };
  const Rates rates = {host_name(), processor_name(),  today(),
                       is_disk,     rate(load.series), rate(figures.write)};
  JsonWriter json(1);
  json.begin_object();
  json.member("version", rates_version);
  visit_fields(json, rates);
  json.end_object();
  try {
    WritableStorage& storage = local_storage().writable();
    const std::string folder = cache + "/loadstone";
    static_cast<void>(storage.try_make_folder(cache));
    static_cast<void>(storage.try_make_folder(folder));
    storage.write_whole(rates_path(cache), folder + "/" + unique_part_name(), json.take() + "\n");
    return true;
  } catch (const Error&) {
    return false;
  }
}

Duration duration_of(const Plan& plan) {
  Duration duration = duration_at_rates(*plan.catalog, plan.bytes_to_read, plan.bytes_to_write);
  duration.is_least = duration.seconds && computes(plan);
  return duration;
}

Duration duration_of(const Conversion& conversion) {
  Duration duration = duration_at_rates(*conversion.plan.catalog, conversion.bytes_to_read,
                                        conversion.bytes_to_write);
  duration.is_least = duration.seconds && computes(conversion.plan);
  return duration;
}

std::string duration_line(const Duration& duration) {
  return "duration  " + duration_text(duration) + '\n';
}

std::string with_duration(const Duration& duration, const std::string& json) {
  JsonWriter writer(2);
  writer.begin_object();
  writer.key("duration");
  writer.begin_object();
  writer.member("seconds", duration.seconds);
  writer.member("is_lower_bound", duration.is_least);
  writer.member("text", duration_text(duration));
  writer.end_object();
  return joined(std::move(writer), json);
}

}  // namespace loadstone::cli
