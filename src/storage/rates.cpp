#include "storage/rates.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <optional>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "loadstone/error.h"
#include "loadstone/machine.h"
#include "loadstone/storage.h"
#include "storage/new_file.h"

namespace loadstone {

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Rate> auto& rate) {
  visitor.member("mount", rate.mount);
  visitor.member("is_write", rate.is_write);
  visitor.member("is_disk", rate.is_disk);
  visitor.member("date", rate.date);
  visitor.member("bytes_per_second", rate.bytes_per_second);
  visitor.optional("encoding", rate.encoding);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Rates> auto& rates) {
  visitor.member("host", rates.host);
  visitor.member("processor", rates.processor);
  visitor.member("rates", rates.rates);
}

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

}  // namespace

const Rate* Rates::find(const std::string& mount, bool is_write) const {
  const auto is_it = [&](const Rate& each) {
    return each.mount == mount && each.is_write == is_write;
  };
  const auto found = std::ranges::find_if(rates, is_it);
  return found == rates.end() ? nullptr : &*found;
}

const Rate* Rates::find_encoding(const std::string& encoding) const {
  const auto found = std::ranges::find(rates, encoding, &Rate::encoding);
  return found == rates.end() ? nullptr : &*found;
}

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

Rate rate_of_today(const std::string& path, bool is_write, bool is_disk,
                   std::uint64_t bytes_per_second) {
  return {mount_of(path), is_write, is_disk, today(), bytes_per_second};
}

Rate encoding_rate_of_today(const std::string& encoding, std::uint64_t bytes_per_second) {
  return {.mount = {}, .date = today(), .bytes_per_second = bytes_per_second, .encoding = encoding};
}

void save_rates(const std::vector<Rate>& rates, const std::string& file) {
  Rates all = saved_rates(file);
  for (const Rate& rate : rates) {
    std::erase_if(all.rates, [&](const Rate& each) {
      return each.mount == rate.mount && each.is_write == rate.is_write &&
             each.encoding == rate.encoding;
    });
    all.rates.push_back(rate);
  }
  JsonWriter json(1);
  json.begin_object();
  json.member("version", rates_version);
  visit_fields(json, all);
  json.end_object();
  const std::string part = file.substr(0, file.rfind('/') + 1) + unique_part_name();
  local_storage().writable().write_whole(file, part, json.take() + "\n");
}

}  // namespace loadstone
