// Declares functions that write small valid and invalid checkpoints, and a temporary folder for
// them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone::test {

// Returns the little-endian bytes of a value, as stored in files.
template <typename Value>
[[nodiscard]] std::string raw(const Value& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename Value>
[[nodiscard]] std::string raw_all(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}
// Returns `count` bytes that differ by position and seed.
[[nodiscard]] std::string some_bytes(std::size_t count, unsigned seed = 1);
// Returns GGUF blocks that each start with `scales` finite F16 scales.
[[nodiscard]] std::string some_blocks(std::size_t count, std::size_t block_bytes,
                                      std::size_t scales, unsigned seed = 1);

struct FileTensor {
  std::string name;
  std::string dtype;  // the file format's name, such as "F32"
  std::vector<std::uint64_t> shape;
  std::string data;
};

// Returns a valid file with the tensors in the given order. The header is padded to 8 bytes.
[[nodiscard]] std::string safetensors_bytes(
    const std::vector<FileTensor>& tensors,
    const std::map<std::string, std::string>& metadata = {});
// Returns a safetensors file with this header, valid or not, and the correct length field.
[[nodiscard]] std::string safetensors_raw(std::string_view header, std::string_view data = {});
// Returns an entry of a header: "name":{"dtype":...}
[[nodiscard]] std::string safetensors_entry(std::string_view name, std::string_view dtype,
                                            const std::vector<std::uint64_t>& shape,
                                            std::uint64_t begin, std::uint64_t end);
[[nodiscard]] std::string json_string(std::string_view text);
[[nodiscard]] std::string index_json(const std::map<std::string, std::string>& weight_map,
                                     std::int64_t total_size = -1);

// Builds a GGUF file from parts, each of which can be made invalid.
class GgufWriter {
 public:
  static constexpr std::uint32_t u8 = 0, i8 = 1, u16 = 2, i16 = 3, u32 = 4, i32 = 5, f32 = 6,
                                 boolean = 7, string = 8, array = 9, u64 = 10, i64 = 11, f64 = 12;

  // Returns the length and the text.
  [[nodiscard]] static std::string text(std::string_view text);

  // Adds a key, a type and the raw bytes of the value.
  GgufWriter& entry(std::string_view key, std::uint32_t type, std::string_view value);
  GgufWriter& entry_text(std::string_view key, std::string_view value) {
    return entry(key, string, text(value));
  }
  template <typename Value>
  GgufWriter& entry_number(std::string_view key, std::uint32_t type, Value value) {
    return entry(key, type, raw(value));
  }
  // Adds a tensor. `dims` is in the file's order, fastest first. The data follows earlier data,
  // aligned.
  GgufWriter& tensor(std::string_view name, const std::vector<std::uint64_t>& dims,
                     std::uint32_t type, std::string_view data);
  // Adds the info of a tensor with this offset, and no data.
  GgufWriter& info(std::string_view name, const std::vector<std::uint64_t>& dims,
                   std::uint32_t type, std::uint64_t offset);
  // Adds bytes after the data of the last tensor.
  GgufWriter& data(std::string_view bytes);

  [[nodiscard]] std::string bytes() const;

  std::uint32_t version = 3;
  std::uint64_t alignment = 32;   // not written: add general.alignment yourself
  std::int64_t more_entries = 0;  // added to the count in the header
  std::int64_t more_tensors = 0;
  bool pad_tail = true;

 private:
  std::string entries_;
  std::string infos_;
  std::string data_;
  std::uint64_t entry_count_ = 0;
  std::uint64_t tensor_count_ = 0;
};

// A temporary folder, removed on destruction.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::string operator/(std::string_view name) const { return path_ / name; }
  // Writes a file and creates its folders; returns its path.
  std::string write(std::string_view name, std::string_view bytes) const;

 private:
  std::filesystem::path path_;
};

[[nodiscard]] std::string read_file(const std::string& path);

}  // namespace loadstone::test
