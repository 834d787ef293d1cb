#include "load/duration.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <string_view>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "catalog/paths.h"
#include "loadstone/error.h"
#include "loadstone/machine.h"
#include "loadstone/storage.h"
#include "storage/new_file.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

constexpr std::uint64_t rates_version = 2;
constexpr std::size_t rates_bytes_max = 64 << 10;
constexpr const char* rates_code = "usage";  // the code of parse errors, which are caught

std::string host_name() {
  std::array<char, 256> name = {};  // the last byte stays NUL
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm date = {};
  ::gmtime_r(&now, &date);
  return fmt::format("{:04}-{:02}-{:02}", date.tm_year + 1900, date.tm_mon + 1, date.tm_mday);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Rate> auto& rate) {
  visitor.member("mount", rate.mount);
  visitor.member("is_write", rate.is_write);
  visitor.member("is_disk", rate.is_disk);
  visitor.member("date", rate.date);
  visitor.member("bytes_per_second", rate.bytes_per_second);
}

// The rates of a machine, as the file has them.
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
Rates saved_rates(const std::string& file) {
  Rates rates;
  try {
    if (file.empty()) return rates;
    const auto text = local_storage().writable().read_begin(file, rates_bytes_max);
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

// Returns true if the work encodes or decodes values.
bool computes(const Plan& plan) {
  return !plan.decodings.empty() ||
         std::ranges::any_of(plan.targets, [](const PlannedTarget& target) {
           return target.quantization.has_value();
         });
}

}  // namespace

Rate rate_of_today(const std::string& path, bool is_write, bool is_disk,
                   std::uint64_t bytes_per_second) {
  return {mount_of(path), is_write, is_disk, today(), bytes_per_second};
}

void save_rates(const std::vector<Rate>& rates, const std::string& file) {
  Rates all = saved_rates(file);
  for (const Rate& rate : rates) {
    std::erase_if(all.rates, [&](const Rate& each) {
      return each.mount == rate.mount && each.is_write == rate.is_write;
    });
    all.rates.push_back(rate);
  }
  JsonWriter json(1);
  json.begin_object();
  json.member("version", rates_version);
  visit_fields(json, all);
  json.end_object();
  const std::string part = parent_path(file) + "/" + unique_part_name();
  local_storage().writable().write_whole(file, part, json.take() + "\n");
}

std::string Duration::text() const {
  if (!seconds) return "unknown: " + reason;
  const std::string time =
      *seconds < 1 ? "less than 1 s" : fmt::format("about {}", time_text(*seconds));
  return fmt::format("{} ({})", is_least ? "at least " + time_text(*seconds) : time,
                     reason + (is_least ? "; computing takes longer" : ""));
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
      .is_least = computes(plan),
      .reason = "measured by 'loadstone bench': " + measured};
}

}  // namespace loadstone
