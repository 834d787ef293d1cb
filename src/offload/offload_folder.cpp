#include "offload/offload_folder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/json_writer.h"
#include "catalog/paths.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

using Clock = std::chrono::steady_clock;

// Few values per file, because a reader parses the whole header each time that it fetches a value.
constexpr std::size_t values_per_file = 64;
// Added values are kept in memory until they reach this size.
constexpr std::size_t added_bytes_max = 64u << 20;

// Throws if NAME.dat would not be a single file in the folder, for loadstone and for every other
// reader.
void require_file_name(const std::string& name) {
  const bool harmless = !name.empty() && name.find('/') == std::string::npos &&
                        name.find('\0') == std::string::npos &&
                        name.find("..") == std::string::npos;
  if (harmless) return;
  throw Error("offload.name", "this name is not a valid file name",
              {.tensor = name, .expected = "a name without '/', '..' and NUL"});
}

bool is_there(WritableStorage& storage, const std::string& path) {
  FileStatus status;
  return storage.try_status(path, true, status) == 0;
}

// Returns true if `name` is a component of a quantized tensor in `names`: "layer.weight.absmax" for
// "layer.weight". An older entry of such a name belongs to the older value and is dropped.
bool is_component_of(const NameSet& names, std::string_view name) {
  for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
    if (names.contains(name.substr(0, dot))) return true;
  }
  return false;
}

// Locks the folder while the index is read, merged and replaced, and while files are removed.
std::unique_ptr<FileLock> locked(WritableStorage& storage, const std::string& folder) {
  auto lock = storage.open_lock(folder);
  if (lock != nullptr) static_cast<void>(lock->take(LockMode::exclusive, true));
  return lock;
}

}  // namespace

OffloadFolder::OffloadFolder(const Plan& plan, Storage& storage, std::string own_file)
    : folder_(plan.offload_folder),
      own_file_(std::move(own_file)),
      storage_(storage.writable()),
      parts_(plan.targets.size()) {
  for (OffloadEntry& entry : offload_entries(plan, storage)) put(std::move(entry));
  bool writes = false;
  for (const PlannedTarget& target : plan.targets) {
    if (target.delivery != Delivery::disk_write) continue;
    writes = true;
    require_file_name(target.name);
  }
  if (entries_.empty() || (!writes && folder_.empty())) return;
  try {
    begin();
    make_values(plan);
  } catch (...) {
    remove_all();
    throw;
  }
}

OffloadFolder::~OffloadFolder() { remove_all(); }

void OffloadFolder::begin() {
  if (folder_.empty())
    throw Error("plan.options", "tensors must be offloaded, but no offload folder was passed");
  is_active_ = true;
  make_folder();
  real_folder_ = storage_.real_path(folder_);
  const auto lock = locked(storage_, folder_);
  remove_stale_offload(storage_, real_folder_, read_offload_index(storage_, index_path()),
                       own_file_);
  std::string run = random_name();
  lock_path_ = folder_ + "/" + offload_lock_name(run);
  static_cast<void>(storage_.create(lock_path_));
  run_ = std::move(run);  // from here on, this run must remove the lock file
  run_lock_ = storage_.open_lock(lock_path_);
  if (run_lock_ != nullptr) static_cast<void>(run_lock_->take(LockMode::exclusive, false));
}

void OffloadFolder::make_folder() {
  std::vector<std::string> missing;
  for (std::string path = folder_; !is_there(storage_, path); path = parent_path(path)) {
    missing.push_back(path);
    if (path == parent_path(path)) break;
  }
  made_folders_.reserve(missing.size());
  for (auto path = missing.rbegin(); path != missing.rend(); ++path) {
    if (storage_.make_folder(*path)) made_folders_.push_back(*path);
  }
}

void OffloadFolder::make_files(std::vector<OffloadValue> values) {
  std::vector<OffloadValue> group;
  for (OffloadValue& value : values) {
    if (!is_readable_offload(value.dtype)) {
      make_file({std::move(value)}, true);
      continue;
    }
    group.push_back(std::move(value));
    if (group.size() == values_per_file) make_file(std::exchange(group, {}), false);
  }
  if (!group.empty()) make_file(std::move(group), false);
}

void OffloadFolder::make_file(std::vector<OffloadValue> values, bool is_raw) {
  const std::string name = offload_data_name(run_, files_.size() + 1, is_raw);
  OffloadFile& file =
      files_.emplace_back(storage_, folder_ + "/" + name, std::move(values), is_raw);
  for (OffloadValue& value : file.values()) {
    if (!places_.emplace(value.name, Place{&file, &value}).second) {
      throw Error("offload.name", "two tensors of the folder have the same name",
                  {.tensor = value.name});
    }
    OffloadEntry* const entry = entry_of(value.name);
    if (entry == nullptr) continue;
    entry->is_written = true;
    entry->weight_name = value.name;
    if (!is_raw) entry->safetensors_file = real_folder_ + "/" + name;
  }
}

void OffloadFolder::make_values(const Plan& plan) {
  const auto each_part = [&](const auto& visit) {
    for (std::size_t i = 0; i < plan.targets.size(); ++i) {
      if (plan.targets[i].delivery != Delivery::disk_write) continue;
      for (QuantizedPart& part : named_parts(plan.targets[i])) visit(i, part);
    }
  };
  std::vector<OffloadValue> values;
  each_part([&](std::size_t, QuantizedPart& part) {
    const std::uint64_t bytes = part.byte_count();
    values.push_back({std::move(part.name), part.dtype, std::move(part.shape), bytes});
  });
  make_files(std::move(values));
  each_part([&](std::size_t target, const QuantizedPart& part) {
    parts_[target].push_back(places_.at(part.name).value->data);
  });
  for (const OffloadEntry& entry : entries()) {
    if (!entry.tie_of.empty()) tie(entry.target, entry.tie_of);
  }
}

OffloadEntry* OffloadFolder::entry_of(const std::string& name) noexcept {
  const auto entry = entry_of_.find(name);
  return entry == entry_of_.end() ? nullptr : &entries_[entry->second];
}

std::vector<OffloadEntry> OffloadFolder::entries() const {
  std::vector<OffloadEntry> entries;
  std::ranges::copy_if(entries_, std::back_inserter(entries),
                       [](const OffloadEntry& entry) { return !entry.target.empty(); });
  return entries;
}

void OffloadFolder::put(OffloadEntry entry) {
  remove(entry.target);
  entry_of_.emplace(entry.target, entries_.size());
  entries_.push_back(std::move(entry));
}

OffloadEntry& OffloadFolder::required(const std::string& name) {
  OffloadEntry* const entry = entry_of(name);
  if (entry == nullptr) {
    throw Error("offload.name", "the offload folder has no tensor of this name", {.tensor = name});
  }
  return *entry;
}

OffloadValue& OffloadFolder::value_of(const std::string& name) {
  const auto place = places_.find(required(name).weight_name);
  if (!required(name).is_written || place == places_.end()) {
    throw Error("offload.name", "this tensor was not written", {.tensor = name});
  }
  return *place->second.value;
}

std::span<const std::byte> OffloadFolder::value(const std::string& name) {
  const OffloadValue& value = value_of(name);
  return {value.data, static_cast<std::size_t>(value.byte_count)};
}

void OffloadFolder::add(const std::string& name, Dtype dtype, Shape shape,
                        std::span<const std::byte> bytes) {
  require_file_name(name);
  const std::string_view dtype_name = dtype_info(dtype).torch_name;
  if (dtype_name.empty()) {
    throw Error("plan.dtype", "the format of offload folders does not support this dtype",
                {.tensor = name});
  }
  if (!is_active_) begin();
  put({.target = name, .dtype = dtype_name, .shape = shape});
  added_.push_back({{name, dtype, std::move(shape), bytes.size()}, {bytes.begin(), bytes.end()}});
  added_bytes_ += bytes.size();
  if (added_bytes_ >= added_bytes_max) write_added();
}

void OffloadFolder::write_added() {
  if (added_.empty()) return;
  const std::vector<Added> added = std::exchange(added_, {});
  added_bytes_ = 0;
  std::vector<OffloadValue> values;
  for (const Added& each : added) values.push_back(each.value);
  make_files(std::move(values));
  for (const auto& [value, bytes] : added) {
    if (!bytes.empty()) std::memcpy(places_.at(value.name).value->data, bytes.data(), bytes.size());
  }
}

void OffloadFolder::rename(const std::string& from, const std::string& to) {
  require_file_name(to);
  OffloadEntry entry = required(from);
  remove(from);
  entry.target = to;
  put(std::move(entry));
}

void OffloadFolder::remove(const std::string& name) {
  const auto entry = entry_of_.find(name);
  if (entry == entry_of_.end()) return;
  entries_[entry->second].target.clear();
  entry_of_.erase(entry);
}

void OffloadFolder::retype(const std::string& name, Dtype dtype, Shape shape) {
  OffloadValue& value = value_of(name);
  const auto elements = shape.numel();
  if (!elements || *elements * (bits(dtype) / 8) != value.byte_count ||
      !is_readable_offload(dtype)) {
    throw Error("plan.dtype", "the number of bytes does not fit the dtype and shape",
                {.tensor = name});
  }
  OffloadEntry& entry = required(name);
  entry.dtype = dtype_info(dtype).torch_name;
  entry.shape = shape;
  value.dtype = dtype;
  value.shape = std::move(shape);
}

void OffloadFolder::tie(const std::string& name, const std::string& root) {
  write_added();  // the root may be an added value
  OffloadEntry entry = required(root);
  entry.target = name;
  entry.tie_of = root;
  put(std::move(entry));
}

std::shared_ptr<FileLock> OffloadFolder::lock_values() {
  write_added();
  const auto first = std::ranges::find(files_, false, &OffloadFile::is_raw);
  if (first == files_.end()) return nullptr;
  std::shared_ptr<FileLock> lock =
      storage_.open_lock(real_folder_ + "/" + std::string(file_name(first->path())));
  if (lock != nullptr) static_cast<void>(lock->take(LockMode::shared, false));
  return lock;
}

void OffloadFolder::commit() {
  if (!is_active_ || is_committed_) return;
  write_added();
  const auto begin = Clock::now();
  for (OffloadFile& file : files_) file.finish();
  storage_.sync_folder(folder_);
  for (const std::string& path : made_folders_) storage_.sync_folder(parent_path(path));
  const auto lock = locked(storage_, folder_);
  const std::string path = index_path();
  const OffloadIndex known = read_offload_index(storage_, path);
  name_raw_files();
  storage_.write_whole(path, folder_ + "/" + offload_index_name(run_), index_text(known));
  is_committed_ = true;
  files_committed();
  storage_.sync_folder(folder_);
  remove_replaced(known);
  end_run();
  sync_seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();
}

// Gives raw files their final names. Values that safetensors cannot store must have the names that
// the folder's layout prescribes, so they cannot be replaced atomically with the index.
void OffloadFolder::name_raw_files() {
  for (const OffloadEntry& entry : entries()) {
    if (!entry.is_written || !entry.safetensors_file.empty()) continue;
    const std::string path = folder_ + "/" + entry.target + offload_raw_ending;
    if (is_there(storage_, path)) {
      throw Error("plan.dtype",
                  "a tensor of this dtype cannot be replaced in an offload folder; pass another "
                  "folder, or remove the file",
                  {.path = path, .tensor = entry.target, .found = std::string(entry.dtype)});
    }
    raw_named_.reserve(raw_named_.size() + 1);
    storage_.link(places_.at(entry.weight_name).file->path(), path);
    raw_named_.push_back(path);
  }
}

// Returns {"name": {"safetensors_file": ..., "weight_name": ..., "dtype": ..., "shape": [...]}}.
// Values in NAME.dat have no safetensors_file and no weight_name.
std::string OffloadFolder::index_text(const OffloadIndex& known) const {
  NameSet names;
  const auto entries = this->entries();
  for (const OffloadEntry& entry : entries) names.insert(entry.target);
  JsonWriter json(2);
  json.begin_object();
  for (const auto& [name, member] : known.members) {
    if (names.contains(name) || is_component_of(names, name)) continue;
    json.key(name);
    json.raw(member);
  }
  for (const OffloadEntry& entry : entries) {
    json.key(entry.target);
    json.begin_object();
    if (!entry.safetensors_file.empty()) {
      json.member("safetensors_file", entry.safetensors_file);
      json.member("weight_name", entry.weight_name);
    }
    json.member("dtype", entry.dtype);
    if (entry.is_written) json.member("shape", entry.shape.extents());
    json.end_object();
  }
  json.end_object();
  return json.take() + "\n";
}

// Frees the memory of the values, and removes the old names of renamed files.
void OffloadFolder::files_committed() noexcept {
  for (const OffloadFile& file : files_) {
    if (file.is_raw()) storage_.remove(file.path());
  }
  files_.clear();
  for (auto& parts : parts_) parts.clear();
}

// Removes the files of values that neither an entry nor a model refers to any more.
void OffloadFolder::remove_replaced(const OffloadIndex& known) noexcept {
  try {
    const OffloadIndex now = read_offload_index(storage_, index_path());
    remove_stale_offload(storage_, real_folder_, now, own_file_);
    for (const std::string& name : known.raw_names) {
      if (name.find('/') != std::string::npos || now.raw_names.contains(name)) continue;
      storage_.remove(folder_ + "/" + name + offload_raw_ending);
    }
  } catch (const std::exception&) {
    return;  // the next run removes the remaining files
  }
}

void OffloadFolder::end_run() noexcept {
  if (!run_.empty()) storage_.remove(lock_path_);
  run_.clear();
  run_lock_.reset();
}

void OffloadFolder::remove_all() noexcept {
  if (!is_committed_) {
    for (const std::string& path : raw_named_) storage_.remove(path);
    for (const OffloadFile& file : files_) storage_.remove(file.path());
  }
  files_.clear();
  is_active_ = false;
  end_run();
  if (is_committed_) return;
  for (auto path = made_folders_.rbegin(); path != made_folders_.rend(); ++path) {
    storage_.remove_folder(*path);
  }
  made_folders_.clear();
}

}  // namespace loadstone
