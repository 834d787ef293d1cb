#include "cli/duration.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

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

constexpr std::uint64_t rates_version = 2;
constexpr std::size_t rates_bytes_max = 64 << 10;
constexpr std::string_view unsaved =
    "the rates could not be saved in the cache folder, so plans show no duration";
constexpr const char* rates_code = "usage";  // the code of parse errors, which are caught

std::string host_name() {
  std::array<char, 256> name = {};  // the last byte stays NUL
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// The rate of reads from one file system, or of writes to it.
struct Rate {
  std::string mount;  // where the file system is mounted
  bool is_write = false;
  bool is_disk = false;  // true: read from the disk, else from the page cache
  std::string date;      // "2026-11-30"
  std::uint64_t bytes_per_second = 0;
};

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Rate> auto& rate) {
  visitor.member("mount", rate.mount);
  visitor.member("is_write", rate.is_write);
  visitor.member("is_disk", rate.is_disk);
  visitor.member("date", rate.date);
  visitor.member("bytes_per_second", rate.bytes_per_second);
}

// The rates of a machine, as bench.json has them.
struct Rates {
  std::string host;
  std::string processor;
  std::vector<Rate> rates;

  // Returns null if the rate of this file system is unknown.
  [[nodiscard]] const Rate* find(const std::string& mount, bool is_write) const {
    const auto is_it = [&](const Rate& each) {
      return each.mount == mount && each.is_write == is_write;
    };
    const auto found = std::ranges::find_if(rates, is_it);
    return found == rates.end() ? nullptr : &*found;
  }
  void replace(Rate rate) {
    std::erase_if(rates, [&](const Rate& each) {
      return each.mount == rate.mount && each.is_write == rate.is_write;
    });
    rates.push_back(std::move(rate));
  }
};

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Rates> auto& rates) {
  visitor.member("host", rates.host);
  visitor.member("processor", rates.processor);
  visitor.member("rates", rates.rates);
}

// Returns the folder at which the file system of a path is mounted. The path need not exist.
std::string mount_of(const std::string& path) {
  WritableStorage& storage = local_storage().writable();
  const auto device = [&](const std::filesystem::path& of) {
    FileStatus status;
    return storage.try_status(of.string(), true, status) == 0
               ? std::optional(status.identity.device)
               : std::nullopt;
  };
  std::filesystem::path mount = storage.real_path(path);
  while (!device(mount) && mount.has_relative_path()) mount = mount.parent_path();
  while (mount.has_relative_path() && device(mount.parent_path()) == device(mount)) {
    mount = mount.parent_path();
  }
  return mount.string();
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

// Returns the rates of this machine; none if the file is missing, damaged or of another machine.
Rates saved_rates(const std::string& cache) {
  Rates rates;
  try {
    if (cache.empty()) return rates;
    const auto text = local_storage().writable().read_begin(rates_path(cache), rates_bytes_max);
    if (text) rates = parse_rates(*text);
  } catch (const Error&) {
    rates = {};
  }
  const Rates none = {host_name(), processor_name(), {}};
  const bool is_here = rates.host == none.host && rates.processor == none.processor;
  const auto is_usable = [](const Rate& each) {
    return each.bytes_per_second > 0 && is_utf8(each.date);
  };
  return is_here && std::ranges::all_of(rates.rates, is_usable) ? rates : none;
}

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

Duration duration_at_rates(const Catalog& catalog, std::uint64_t bytes_to_read,
                           const std::string& write_path, std::uint64_t bytes_to_write) {
  const auto is_elsewhere = [](const Shard& shard) { return is_remote(shard.path); };
  if (std::ranges::any_of(catalog.shards(), is_elsewhere)) {
    return {.reason = "'loadstone bench' measures only files on this machine"};
  }
  const Rates rates = saved_rates(cache_folder());
  const Rate* const read = rates.find(mount_of(catalog.shards().front().path), false);
  const Rate* const write = bytes_to_write == 0 ? nullptr : rates.find(mount_of(write_path), true);
  const bool lacks_write = bytes_to_write > 0 && write == nullptr;
  if (read == nullptr || lacks_write) {
    return {.reason = fmt::format("run 'loadstone bench CHECKPOINT{}'",
                                  lacks_write ? " --write FOLDER" : "")};
  }
  std::string measured = rate_text(*read);
  if (write != nullptr) measured += ", " + rate_text(*write);
  return {.seconds = seconds_for(bytes_to_read, read) + seconds_for(bytes_to_write, write),
          .reason = "measured by 'loadstone bench': " + measured};
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

std::string save_rates(const BenchFigures& figures, const std::string& read_path,
                       const std::string& write_folder) {
  const std::string cache = cache_folder();
  if (cache.empty()) return std::string(unsaved);
  Rates rates = saved_rates(cache);
  const auto add = [&](const std::string& path, const Series& series, bool is_write, bool is_disk) {
    rates.replace(
        {mount_of(path), is_write, is_disk, today(), static_cast<std::uint64_t>(series.median())});
  };
  const bool is_disk = !figures.load_from_disk.series.seconds.empty();
  const LoadSeries& load = is_disk ? figures.load_from_disk : figures.load_from_page_cache;
  const bool is_enough = figures.sample_bytes >= kept_bytes_min;
  if (is_enough) add(read_path, load.series, false, is_disk);
  if (!figures.write.seconds.empty()) add(write_folder, figures.write, true, true);
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
  } catch (const Error&) {
    return std::string(unsaved);
  }
  if (is_enough) return {};
  return fmt::format("the rate of reads is not saved, because {} are too few: measure at least {}",
                     human_bytes(figures.sample_bytes), exact_bytes(kept_bytes_min));
}

Duration duration_of(const Plan& plan) {
  Duration duration = duration_at_rates(*plan.catalog, plan.bytes_to_read, plan.offload_folder,
                                        plan.bytes_to_write);
  duration.is_least = duration.seconds && computes(plan);
  return duration;
}

Duration duration_of(const Conversion& conversion, const std::string& target) {
  Duration duration = duration_at_rates(*conversion.plan.catalog, conversion.bytes_to_read, target,
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
