#include "load/duration.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
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

constexpr std::uint64_t rates_version = 1;
constexpr std::size_t rates_bytes_max = 64 << 10;
constexpr const char* rates_code = "usage";  // the code of parse errors, which are caught

template <typename Visitor>
void visit_rates(Visitor& visitor, Like<Rates> auto& rates) {
  visitor.member("host", rates.host);
  visitor.member("processor", rates.processor);
  visitor.member("date", rates.date);
  visitor.member("is_disk", rates.is_disk);
  visitor.member("read_bytes_per_second", rates.read);
  visitor.member("write_bytes_per_second", rates.write);
}

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

Rates parse_rates(const std::string& text) {
  const JsonDocument document(text, rates_code, rates_bytes_max);
  const JsonReader reader(rates_code);
  JsonObject fields(reader, document.root(), {});
  fields.require_version(rates_version);
  Rates rates;
  visit_rates(fields, rates);
  fields.done();
  return rates;
}

// Returns the rates of this machine; nullopt if the file is missing, damaged or of another machine.
std::optional<Rates> saved_rates(const std::string& file) {
  if (file.empty()) return std::nullopt;
  try {
    const auto text = local_storage().writable().read_begin(file, rates_bytes_max);
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

// Returns true if the work encodes or decodes values.
bool computes(const Plan& plan) {
  return !plan.decodings.empty() ||
         std::ranges::any_of(plan.targets, [](const PlannedTarget& target) {
           return target.quantization.has_value();
         });
}

}  // namespace

Rates rates_of_this_machine() {
  return {.host = host_name(), .processor = processor_name(), .date = today()};
}

void save_rates(const Rates& rates, const std::string& file) {
  JsonWriter json(1);
  json.begin_object();
  json.member("version", rates_version);
  visit_rates(json, rates);
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

Duration duration_of(const Plan& plan, std::uint64_t bytes_to_read, std::uint64_t bytes_to_write,
                     const std::string& rates_file) {
  const auto is_elsewhere = [](const Shard& shard) { return is_remote(shard.path); };
  if (std::ranges::any_of(plan.catalog->shards(), is_elsewhere)) {
    return {.reason = "'loadstone bench' measures only files on this machine"};
  }
  const std::optional<Rates> rates = saved_rates(rates_file);
  if (!rates) return {.reason = "run 'loadstone bench CHECKPOINT'"};
  if (bytes_to_write > 0 && rates->write == 0) {
    return {.reason = "run 'loadstone bench CHECKPOINT --write FOLDER'"};
  }
  std::string measured =
      rate_text(rates->read, rates->is_disk ? "read from the disk" : "read from the page cache");
  if (bytes_to_write > 0) measured += ", " + rate_text(rates->write, "written");
  return {.seconds =
              seconds_for(bytes_to_read, rates->read) + seconds_for(bytes_to_write, rates->write),
          .is_least = computes(plan),
          .reason = fmt::format("measured by 'loadstone bench' on {}: {}", printable(rates->date),
                                measured)};
}

}  // namespace loadstone
