#include "execute/offload.h"

#include <fcntl.h>
#include <simdjson.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <optional>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "base/json_writer.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

// A name becomes one file in the folder and nothing else.
void require_file_name(const std::string& name) {
  const bool harmless = !name.empty() && name.find('/') == std::string::npos &&
                        name.find('\0') == std::string::npos &&
                        name.find("..") == std::string::npos;
  if (harmless) return;
  Where where;
  where.tensor = name;
  where.expected = "a name without '/', '..' and NUL";
  throw Error("offload.name", "this name cannot be the name of a file", std::move(where));
}

// Parts as tensors of their own.
std::vector<QuantizedPart> named_parts(const PlannedTarget& target) {
  auto parts = quantized_parts(*target.quantization, target.shape, target.dtype);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].name = i == 0 ? target.name : target.name + "." + parts[i].name;
  }
  return parts;
}

// Members of an index that is there already, but for the names that are written anew.
void keep_other_names(JsonWriter& json, const std::string& path,
                      const std::unordered_set<std::string, NameHash, std::equal_to<>>& names) {
  simdjson::dom::parser parser;
  simdjson::dom::object index;
  const auto problem = parser.load(path).get_object().get(index);
  if (problem == simdjson::IO_ERROR && ::access(path.c_str(), F_OK) != 0) return;
  if (problem != simdjson::SUCCESS) {
    Where where;
    where.path = path;
    where.found = simdjson::error_message(problem);
    where.expected = "a JSON object";
    throw Error("offload.index", "the folder's index cannot be kept", std::move(where));
  }
  for (const auto& [key, value] : index) {
    const std::string name(key);
    if (names.contains(name)) continue;
    json.key(name);
    json.raw(simdjson::minify(value));
  }
}

}  // namespace

std::string_view offload_dtype_name(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::boolean:
      return "bool";
    case Dtype::u8:
      return "uint8";
    case Dtype::i8:
      return "int8";
    case Dtype::u16:
      return "uint16";
    case Dtype::i16:
      return "int16";
    case Dtype::u32:
      return "uint32";
    case Dtype::i32:
      return "int32";
    case Dtype::u64:
      return "uint64";
    case Dtype::i64:
      return "int64";
    case Dtype::f16:
      return "float16";
    case Dtype::bf16:
      return "bfloat16";
    case Dtype::f32:
      return "float32";
    case Dtype::f64:
      return "float64";
    case Dtype::c64:
      return "complex64";
    case Dtype::c128:
      return "complex128";
    case Dtype::f8_e4m3:
      return "float8_e4m3fn";
    case Dtype::f8_e5m2:
      return "float8_e5m2";
    case Dtype::f8_e8m0:
      return "float8_e8m0fnu";
    case Dtype::f8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case Dtype::f8_e5m2fnuz:
      return "float8_e5m2fnuz";
    case Dtype::f6_e2m3:
    case Dtype::f6_e3m2:
    case Dtype::f4:
      return {};
  }
  return {};
}

std::vector<OffloadEntry> offload_entries(const Plan& plan, Storage& storage) {
  std::vector<OffloadEntry> entries;
  for (const PlannedTarget& target : plan.targets) {
    const bool keeps = target.delivery == Delivery::disk_keep;
    if (!keeps && target.delivery != Delivery::disk_write) continue;
    if (target.quantization) {
      for (const QuantizedPart& part : named_parts(target)) {
        entries.push_back({.target = part.name,
                           .safetensors_file = {},
                           .weight_name = {},
                           .dtype = offload_dtype_name(part.dtype),
                           .shape = part.shape});
      }
      continue;
    }
    OffloadEntry& entry = entries.emplace_back();
    entry.target = target.name;
    entry.shape = target.shape;
    entry.dtype = offload_dtype_name(target.dtype);
    if (entry.dtype.empty()) {
      Where where;
      where.tensor = target.name;
      where.found = name(target.dtype);
      throw Error("plan.dtype", "the offload folder's layout has no such dtype", std::move(where));
    }
    if (!keeps) continue;
    const TensorInfo& source = plan.catalog->tensors().at(target.recipe.boxes.at(0).source);
    entry.safetensors_file = storage.resolve(plan.catalog->shards()[source.shard].path);
    entry.weight_name = source.name;
  }
  return entries;
}

OffloadFolder::OffloadFolder(const Plan& plan, Storage& storage)
    : folder_(plan.offload_folder),
      data_(plan.targets.size(), nullptr),
      parts_(plan.targets.size()) {
  const std::vector<OffloadEntry> entries = offload_entries(plan, storage);
  bool writes = false;
  for (const PlannedTarget& target : plan.targets) {
    if (target.delivery != Delivery::disk_write) continue;
    writes = true;
    require_file_name(target.name);
  }
  if (entries.empty() || (!writes && folder_.empty())) return;
  try {
    make_folder();
    index_ = index_text(entries);
    for (std::size_t i = 0; i < plan.targets.size(); ++i) {
      const PlannedTarget& target = plan.targets[i];
      if (target.delivery != Delivery::disk_write) continue;
      if (!target.quantization) {
        data_[i] = add_value(target.name, target.byte_count());
        continue;
      }
      for (const QuantizedPart& part : named_parts(target)) {
        parts_[i].push_back(add_value(part.name, part.byte_count()));
      }
    }
    write_index();
  } catch (...) {
    remove_all();
    throw;
  }
}

OffloadFolder::~OffloadFolder() { remove_all(); }

void OffloadFolder::make_folder() {
  if (folder_.empty()) throw Error("plan.options", "tensors are offloaded and no folder is named");
  std::error_code problem;
  made_folder_ = std::filesystem::create_directories(folder_, problem);
  if (problem) fail_write(problem.value(), "cannot make the offload folder", folder_);
}

OffloadFolder::File& OffloadFolder::add_file(const std::string& name) {
  File& file = files_.emplace_back();
  file.path = folder_ + "/" + name;
  file.temporary_path = folder_ + "/" + unique_part_name();
  return file;
}

std::byte* OffloadFolder::add_value(const std::string& name, std::uint64_t byte_count) {
  File& file = add_file(name + ".dat");
  const Descriptor descriptor(
      ::open(file.temporary_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (descriptor.get() < 0) fail_write(errno, "cannot make the file", file.path, name);
  map(file, descriptor.get(), byte_count);
  return file.data;
}

void OffloadFolder::map(File& file, int descriptor, std::uint64_t byte_count) {
  if (byte_count == 0) return;
  reserve(descriptor, byte_count, file.path);
  void* pages = ::mmap(nullptr, static_cast<std::size_t>(byte_count), PROT_READ | PROT_WRITE,
                       MAP_SHARED, descriptor, 0);
  if (pages == MAP_FAILED) fail_write(errno, "cannot map the file", file.path);
  file.data = static_cast<std::byte*>(pages);
  file.byte_count = byte_count;
}

// {"name": {"dtype": ..., "shape": [...]}} for what is written, and for what stays where it is
// {"name": {"safetensors_file": ..., "weight_name": ..., "dtype": ...}}.
std::string OffloadFolder::index_text(const std::vector<OffloadEntry>& entries) const {
  std::unordered_set<std::string, NameHash, std::equal_to<>> names;
  for (const OffloadEntry& entry : entries) names.insert(entry.target);
  JsonWriter json(2);
  json.begin_object();
  keep_other_names(json, folder_ + "/index.json", names);
  for (const OffloadEntry& entry : entries) {
    const bool keeps = !entry.safetensors_file.empty();
    json.key(entry.target);
    json.begin_object();
    if (keeps) {
      json.member("safetensors_file", entry.safetensors_file);
      json.member("weight_name", entry.weight_name);
    }
    json.member("dtype", entry.dtype);
    if (!keeps) json.member("shape", entry.shape.extents());
    json.end_object();
  }
  json.end_object();
  return json.take() + "\n";
}

void OffloadFolder::write_index() {
  File& file = add_file("index.json");
  const Descriptor descriptor(
      ::open(file.temporary_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (descriptor.get() < 0) fail_write(errno, "cannot make the file", file.path);
  reserve(descriptor.get(), index_.size(), file.path);
  for (std::size_t done = 0; done < index_.size();) {
    const ssize_t count = ::write(descriptor.get(), index_.data() + done, index_.size() - done);
    if (count < 0 && errno != EINTR) fail_write(errno, "cannot write the file", file.path);
    if (count > 0) done += static_cast<std::size_t>(count);
  }
}

void OffloadFolder::commit() {
  for (File& file : files_) {
    unmap(file);
    give_name(file);
  }
  committed_ = true;
  for (const File& file : files_) {
    if (file.exchanged) ::unlink(file.temporary_path.c_str());
  }
}

// Exchanged with a file that stands there, so that the old one can be put back.
void OffloadFolder::give_name(File& file) {
  const char* from = file.temporary_path.c_str();
  const char* to = file.path.c_str();
  if (::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) == 0) {
    file.exchanged = true;
  } else if (::rename(from, to) != 0) {  // nothing stands there, or exchanging is not supported
    fail_write(errno, "cannot give the file its name", file.path);
  }
  file.named = true;
}

void OffloadFolder::unmap(File& file) noexcept {
  if (file.data != nullptr) ::munmap(file.data, static_cast<std::size_t>(file.byte_count));
  file.data = nullptr;
}

void OffloadFolder::remove_all() noexcept {
  for (File& file : files_) {
    unmap(file);
    if (committed_) continue;
    const char* temporary_path = file.temporary_path.c_str();
    const char* path = file.path.c_str();
    if (file.exchanged) {
      ::renameat2(AT_FDCWD, temporary_path, AT_FDCWD, path, RENAME_EXCHANGE);
    } else if (file.named) {
      ::unlink(path);
    }
    ::unlink(temporary_path);
  }
  if (made_folder_ && !committed_) ::rmdir(folder_.c_str());
  files_.clear();
}

}  // namespace loadstone
