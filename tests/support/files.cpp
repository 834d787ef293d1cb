#include "support/files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <stdexcept>

namespace loadstone::test {

std::string some_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(count, '\0');
  for (char& each : bytes) each = static_cast<char>(random());
  return bytes;
}

std::string some_blocks(std::size_t count, std::size_t block_bytes, std::size_t scales,
                        unsigned seed) {
  std::string bytes = some_bytes(count * block_bytes, seed);
  for (std::size_t block = 0; block < count; ++block) {
    for (std::size_t i = 0; i < scales; ++i) bytes[block * block_bytes + 2 * i + 1] &= '\x3f';
  }
  return bytes;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char each : text) {
    const auto byte = static_cast<unsigned char>(each);
    if (byte < 0x20) {
      out += fmt::format("\\u{:04x}", byte);
    } else {
      if (each == '"' || each == '\\') out += '\\';
      out += each;
    }
  }
  return out + "\"";
}

std::string safetensors_entry(std::string_view name, std::string_view dtype,
                              const std::vector<std::uint64_t>& shape, std::uint64_t begin,
                              std::uint64_t end) {
  return fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                     json_string(name), dtype, fmt::join(shape, ","), begin, end);
}

std::string safetensors_raw(std::string_view header, std::string_view data) {
  return raw(std::uint64_t{header.size()}) + std::string(header) + std::string(data);
}

std::string safetensors_bytes(const std::vector<FileTensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> entries;
  std::string data;
  if (!metadata.empty()) {
    std::vector<std::string> items;
    for (const auto& [key, value] : metadata) {
      items.push_back(json_string(key) + ":" + json_string(value));
    }
    entries.push_back(fmt::format("\"__metadata__\":{{{}}}", fmt::join(items, ",")));
  }
  for (const FileTensor& tensor : tensors) {
    const std::size_t end = data.size() + tensor.data.size();
    entries.push_back(safetensors_entry(tensor.name, tensor.dtype, tensor.shape, data.size(), end));
    data += tensor.data;
  }
  std::string header = fmt::format("{{{}}}", fmt::join(entries, ","));
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return safetensors_raw(header, data);
}

std::string index_json(const std::map<std::string, std::string>& weight_map,
                       std::int64_t total_size) {
  std::vector<std::string> items;
  for (const auto& [tensor, shard] : weight_map) {
    items.push_back(json_string(tensor) + ": " + json_string(shard));
  }
  const std::string metadata =
      total_size < 0 ? "" : fmt::format(R"("metadata": {{"total_size": {}}}, )", total_size);
  return fmt::format(R"({{{}"weight_map": {{{}}}}})", metadata, fmt::join(items, ", "));
}

std::string GgufWriter::text(std::string_view text) {
  return raw(std::uint64_t{text.size()}) + std::string(text);
}

GgufWriter& GgufWriter::entry(std::string_view key, std::uint32_t type, std::string_view value) {
  entries_ += text(key) + raw(type) + std::string(value);
  ++entry_count_;
  return *this;
}

GgufWriter& GgufWriter::info(std::string_view name, const std::vector<std::uint64_t>& dims,
                             std::uint32_t type, std::uint64_t offset) {
  infos_ += text(name) + raw(static_cast<std::uint32_t>(dims.size())) + raw_all(dims) + raw(type) +
            raw(offset);
  ++tensor_count_;
  return *this;
}

GgufWriter& GgufWriter::tensor(std::string_view name, const std::vector<std::uint64_t>& dims,
                               std::uint32_t type, std::string_view bytes) {
  data_.resize((data_.size() + alignment - 1) / alignment * alignment, '\0');
  info(name, dims, type, data_.size());
  return data(bytes);
}

GgufWriter& GgufWriter::data(std::string_view bytes) {
  data_ += bytes;
  return *this;
}

std::string GgufWriter::bytes() const {
  std::string file = "GGUF" + raw(version);
  file += raw(tensor_count_ + static_cast<std::uint64_t>(more_tensors));
  file += raw(entry_count_ + static_cast<std::uint64_t>(more_entries));
  file += entries_ + infos_;
  if (data_.empty()) return file;
  file.resize((file.size() + alignment - 1) / alignment * alignment, '\0');
  file += data_;
  if (pad_tail) file.resize((file.size() + alignment - 1) / alignment * alignment, '\0');
  return file;
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "loadstone-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
  path_ = std::filesystem::canonical(pattern);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TemporaryFolder::write(std::string_view name, std::string_view bytes) const {
  const std::filesystem::path path = path_ / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("cannot write " + path.string());
  return path.string();
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace loadstone::test
