#include "offload/offload_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "base/ceil_div.h"
#include "base/json_dom.h"
#include "base/json_writer.h"
#include "catalog/paths.h"
#include "formats/safetensors.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::size_t run_length = 16;
constexpr std::string_view data_prefix = "loadstone-";
constexpr std::string_view hidden_prefix = ".loadstone-";
// Alignment of the values, so that their elements are aligned for computation.
constexpr std::uint64_t header_alignment = 64;
// Spare bytes in a header. The header is written last, and an entry may get a different dtype and
// shape until then.
constexpr std::uint64_t spare_bytes_per_entry = 64;

bool is_run(std::string_view text) noexcept {
  return text.size() == run_length && text.find_first_not_of("0123456789abcdef") == text.npos;
}

// Returns the run that made the file, or an empty string if no run did.
std::string_view run_of(std::string_view name) noexcept {
  std::string_view rest = name;
  if (rest.starts_with(hidden_prefix)) {
    rest.remove_prefix(hidden_prefix.size());
    const std::string_view run = rest.substr(0, run_length);
    rest.remove_prefix(run.size());
    return is_run(run) && (rest == ".part" || rest == ".json") ? run : std::string_view();
  }
  if (!rest.starts_with(data_prefix)) return {};
  rest.remove_prefix(data_prefix.size());
  const std::string_view run = rest.substr(0, run_length);
  rest.remove_prefix(run.size());
  if (!is_run(run) || !rest.starts_with('-')) return {};
  rest.remove_prefix(1);
  const std::size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  rest.remove_prefix(digits);
  return digits >= 5 && (rest == ".safetensors" || rest == ".dat") ? run : std::string_view();
}

// Returns the file on which OffloadFolder::lock_values() is taken; an empty string if the run left
// no such file.
std::string values_lock(const std::set<std::string>& names, std::string_view run) {
  const auto first = names.lower_bound(fmt::format("{}{}-", data_prefix, run));
  for (auto name = first; name != names.end() && run_of(*name) == run; ++name) {
    if (name->ends_with(".safetensors")) return *name;
  }
  return {};
}

bool is_locked(WritableStorage& storage, const std::string& path) {
  const auto lock = storage.open_lock(path);
  return lock != nullptr && lock->take(LockMode::exclusive, false) == LockResult::busy;
}

// Returns true if the process of the run has ended.
bool has_ended(WritableStorage& storage, const std::string& lock_path) {
  if (!storage.status(lock_path, true)) return true;
  const auto lock = storage.open_lock(lock_path);
  return lock != nullptr && lock->take(LockMode::exclusive, false) == LockResult::taken;
}

}  // namespace

std::string offload_lock_name(std::string_view run) {
  return fmt::format("{}{}.part", hidden_prefix, run);
}

std::string offload_index_name(std::string_view run) {
  return fmt::format("{}{}.json", hidden_prefix, run);
}

std::string offload_data_name(std::string_view run, std::size_t number, bool is_raw) {
  return fmt::format("{}{}-{:05}.{}", data_prefix, run, number, is_raw ? "dat" : "safetensors");
}

bool is_readable_offload(Dtype dtype) noexcept {
  return is_in_safetensors(dtype) && dtype != Dtype::f8_e8m0 && bits(dtype) % 8 == 0;
}

OffloadFile::OffloadFile(WritableStorage& storage, std::string path,
                         std::vector<OffloadValue> values, bool is_raw)
    : path_(std::move(path)), is_raw_(is_raw), values_(std::move(values)) {
  std::ranges::stable_sort(values_, std::ranges::greater(),
                           [](const OffloadValue& value) { return bits(value.dtype); });
  std::uint64_t total = 0;
  if (!is_raw_) {
    const std::uint64_t least = 8 + header_text().size() + spare_bytes_per_entry * values_.size();
    header_bytes_ = round_up(least, header_alignment);
    total = header_bytes_;
  }
  for (const OffloadValue& value : values_) total += value.byte_count;
  sink_ = storage.create(path_);
  try {
    sink_->reserve(total, Reserve::all);
    memory_ = sink_->map(total);
  } catch (...) {
    storage.remove(path_);
    throw;
  }
  std::uint64_t offset = header_bytes_;
  for (OffloadValue& value : values_) {
    value.data = memory_.data() + offset;
    offset += value.byte_count;
  }
}

std::string OffloadFile::header_text() const {
  JsonWriter json;
  json.begin_object();
  std::uint64_t begin = 0;
  for (const OffloadValue& value : values_) {
    write_entry(json, {value.name, value.dtype, &value.shape, begin, begin + value.byte_count});
    begin += value.byte_count;
  }
  json.end_object();
  return json.take();
}

void OffloadFile::finish() {
  if (!is_raw_) {
    std::string text = header_text();
    if (text.size() > header_bytes_ - 8) {
      throw Error("internal",
                  "the header of an offload file is larger than the space reserved for it",
                  {.path = path_});
    }
    text.resize(header_bytes_ - 8, ' ');
    const std::uint64_t length = text.size();
    static_assert(std::endian::native == std::endian::little);
    std::memcpy(memory_.data(), &length, 8);
    std::memcpy(memory_.data() + 8, text.data(), text.size());
  }
  sink_->sync();
}

OffloadIndex read_offload_index(WritableStorage& storage, const std::string& path) {
  OffloadIndex index;
  const auto text = storage.read_begin(storage.real_path(path), SIZE_MAX);
  if (!text && !storage.status(path, true)) return index;
  dom::parser parser;
  dom::object members;
  const auto problem = text ? parsed_json(parser, *text).get(members) : simdjson::IO_ERROR;
  if (problem != simdjson::SUCCESS) {
    throw Error(
        "offload.index", "the folder's index cannot be read, so entries cannot be added to it",
        {.path = path, .found = simdjson::error_message(problem), .expected = "a JSON object"});
  }
  for (const auto& [key, value] : members) {
    index.members.emplace_back(std::string(key), simdjson::minify(value));
    std::string_view file;
    if (value["safetensors_file"].get_string().get(file) == simdjson::SUCCESS) {
      index.files.emplace(file_name(file));
    } else {
      index.raw_names.emplace(key);
    }
  }
  return index;
}

void remove_stale_offload(WritableStorage& storage, const std::string& folder,
                          const OffloadIndex& index, const std::string& own_file) {
  const auto listed = storage.list(folder);
  const std::set<std::string> names(listed.begin(), listed.end());
  std::map<std::string, bool, std::less<>> ended;
  for (const std::string& name : names) {
    const std::string_view run = run_of(name);
    if (run.empty() || index.files.contains(name)) continue;
    auto known = ended.find(run);
    if (known == ended.end()) {
      const std::string lock_path = folder + "/" + offload_lock_name(run);
      const std::string values = values_lock(names, run);
      const std::string values_path = folder + "/" + values;
      const bool is_read =
          !values.empty() && values_path != own_file && is_locked(storage, values_path);
      known = ended.emplace(run, !is_read && has_ended(storage, lock_path)).first;
    }
    if (known->second) storage.remove(folder + "/" + name);
  }
}

}  // namespace loadstone
