// Writes headers of safetensors files, and whole files from tensors in memory.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "base/ceil_div.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "formats/safetensors.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"
#include "loadstone/save.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

constexpr std::size_t header_alignment = 8;

void check_tensor(const TensorBytes& tensor) {
  if (!is_safetensors_name(tensor.name)) {
    throw Error("convert.name", "a safetensors file cannot have a tensor with this name",
                {.tensor = tensor.name});
  }
  if (!is_in_safetensors(tensor.dtype)) {
    throw Error("plan.dtype", "safetensors does not support this dtype",
                {.tensor = tensor.name, .found = std::string(name(tensor.dtype))});
  }
  const auto elements = tensor.shape.numel();
  const auto bytes = elements ? Encoding(tensor.dtype).byte_count(*elements) : std::nullopt;
  if (bytes == tensor.bytes.size()) return;
  throw Error("usage", "the number of bytes does not fit the dtype and the shape",
              {.tensor = tensor.name,
               .found = counted(tensor.bytes.size(), "byte"),
               .expected = fmt::format("{} {}", name(tensor.dtype), tensor.shape.text())});
}

std::vector<const TensorBytes*> in_order(std::span<const TensorBytes> tensors) {
  std::vector<const TensorBytes*> order;
  NameSet names;
  for (const TensorBytes& tensor : tensors) {
    check_tensor(tensor);
    if (!names.insert(tensor.name).second) {
      throw Error("st.duplicate", "two tensors have the same name", {.tensor = tensor.name});
    }
    order.push_back(&tensor);
  }
  std::ranges::sort(order, [](const TensorBytes* a, const TensorBytes* b) {
    return comes_first(a->dtype, a->name, b->dtype, b->name);
  });
  return order;
}

void write_file(FileSink& file, std::string_view header,
                const std::vector<const TensorBytes*>& tensors, std::uint64_t data_bytes) {
  file.reserve(header.size() + data_bytes, Reserve::if_cheap);
  file.write(0, std::as_bytes(std::span(header)));
  std::uint64_t at = header.size();
  for (const TensorBytes* const tensor : tensors) {
    file.write(at, tensor->bytes);
    at += tensor->bytes.size();
  }
  file.sync();
}

void save(const std::string& path, std::span<const TensorBytes> tensors,
          std::map<std::string, std::string> metadata, WritableStorage& files) {
  const auto order = in_order(tensors);
  metadata.try_emplace("format", "pt");
  std::vector<SafetensorsEntry> entries;
  std::uint64_t end = 0;
  for (const TensorBytes* const tensor : order) {
    const std::uint64_t begin = end;
    end += tensor->bytes.size();
    entries.push_back({tensor->name, tensor->dtype, &tensor->shape, begin, end});
  }
  const std::string header = safetensors_header(metadata, entries);
  if (header.size() - 8 > safetensors_header_bytes_max) {
    throw Error("st.header_too_large", "there are too many tensors for the header of one file",
                {.path = path, .found = counted(header.size(), "byte")});
  }
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  const std::string unfinished = (folder / unique_part_name()).string();
  const auto file = files.create(unfinished);
  try {
    write_file(*file, header, order, end);
    files.rename(unfinished, path);
  } catch (...) {
    files.remove(unfinished);
    throw;
  }
  files.sync_folder(folder.empty() ? "." : folder.string());
}

}  // namespace

bool is_safetensors_name(std::string_view name) noexcept {
  return name != "__metadata__" && is_utf8(name);
}

bool comes_first(Dtype dtype_a, std::string_view name_a, Dtype dtype_b,
                 std::string_view name_b) noexcept {
  return bits(dtype_a) != bits(dtype_b) ? bits(dtype_a) > bits(dtype_b) : name_a < name_b;
}

void write_entry(JsonWriter& json, const SafetensorsEntry& entry) {
  json.key(entry.name);
  json.begin_object();
  json.member("dtype", name(entry.dtype));
  json.member("shape", entry.shape->extents());
  json.member("data_offsets", std::vector<std::uint64_t>{entry.begin, entry.end});
  json.end_object();
}

std::string safetensors_header(const std::map<std::string, std::string>& metadata,
                               std::span<const SafetensorsEntry> entries) {
  JsonWriter json;
  json.begin_object();
  json.key("__metadata__");
  json.begin_object();
  for (const auto& [key, text] : metadata) json.member(key, text);
  json.end_object();
  for (const SafetensorsEntry& entry : entries) write_entry(json, entry);
  json.end_object();
  std::string text = json.take();
  text.resize(round_up(text.size(), header_alignment), ' ');
  std::string length(8, '\0');
  for (std::size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  }
  return length + text;
}

void save_safetensors(const std::string& path, std::span<const TensorBytes> tensors,
                      std::map<std::string, std::string> metadata, WritableStorage* storage) {
  only_errors([&] {
    WritableStorage& files = storage == nullptr ? local_storage().writable() : *storage;
    save(path, tensors, std::move(metadata), files);
  });
}

}  // namespace loadstone
