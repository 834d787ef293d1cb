// Small checkpoints for tests, right and wrong ones, and a folder to put them in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone::test {

// Little-endian bytes of plain values, as files hold them.
template <typename Value>
[[nodiscard]] std::string raw(const Value& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename Value>
[[nodiscard]] std::string raw_all(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}
// `count` bytes that differ from place to place and from seed to seed.
[[nodiscard]] std::string some_bytes(std::size_t count, unsigned seed = 1);
// Blocks of GGUF, each beginning with so many scales in F16, which are finite.
[[nodiscard]] std::string some_blocks(std::size_t count, std::size_t block_bytes,
                                      std::size_t scales, unsigned seed = 1);

struct FileTensor {
  std::string name;
  std::string dtype;  // the format's name, "F32"
  std::vector<std::uint64_t> shape;
  std::string data;
};

// A valid file: tensors in the order given, header padded to 8 bytes.
[[nodiscard]] std::string safetensors_bytes(
    const std::vector<FileTensor>& tensors,
    const std::map<std::string, std::string>& metadata = {});
// Any header before any data, with the length that it has.
[[nodiscard]] std::string safetensors_raw(std::string_view header, std::string_view data = {});
// An entry of a header: "name":{"dtype":...}
[[nodiscard]] std::string safetensors_entry(std::string_view name, std::string_view dtype,
                                            const std::vector<std::uint64_t>& shape,
                                            std::uint64_t begin, std::uint64_t end);
[[nodiscard]] std::string json_string(std::string_view text);
[[nodiscard]] std::string index_json(const std::map<std::string, std::string>& weight_map,
                                     std::int64_t total_size = -1);

// Builds a GGUF file piece by piece; every piece can be made wrong.
class GgufWriter {
 public:
  static constexpr std::uint32_t u8 = 0, i8 = 1, u16 = 2, i16 = 3, u32 = 4, i32 = 5, f32 = 6,
                                 boolean = 7, string = 8, array = 9, u64 = 10, i64 = 11, f64 = 12;

  // A length and the text.
  [[nodiscard]] static std::string text(std::string_view text);

  // A key, a type and the value's bytes as they are.
  GgufWriter& entry(std::string_view key, std::uint32_t type, std::string_view value);
  GgufWriter& entry_text(std::string_view key, std::string_view value) {
    return entry(key, string, text(value));
  }
  template <typename Value>
  GgufWriter& entry_number(std::string_view key, std::uint32_t type, Value value) {
    return entry(key, type, raw(value));
  }
  // dims in the file's order, fastest first; placed after the tensors before it, aligned.
  GgufWriter& tensor(std::string_view name, const std::vector<std::uint64_t>& dims,
                     std::uint32_t type, std::string_view data);
  // An info with an offset of one's own, and no data.
  GgufWriter& info(std::string_view name, const std::vector<std::uint64_t>& dims,
                   std::uint32_t type, std::uint64_t offset);
  // Bytes behind the last tensor's.
  GgufWriter& data(std::string_view bytes);

  [[nodiscard]] std::string bytes() const;

  std::uint32_t version = 3;
  std::uint64_t alignment = 32;   // used for placing; write general.alignment yourself
  std::int64_t more_entries = 0;  // added to the counts
  std::int64_t more_tensors = 0;
  bool pad_tail = true;

 private:
  std::string entries_;
  std::string infos_;
  std::string data_;
  std::uint64_t entry_count_ = 0;
  std::uint64_t tensor_count_ = 0;
};

// A folder of its own, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::string operator/(std::string_view name) const { return path_ / name; }
  // Writes a file, with the folders above it; returns its path.
  std::string write(std::string_view name, std::string_view bytes) const;

 private:
  std::filesystem::path path_;
};

[[nodiscard]] std::string read_file(const std::string& path);

}  // namespace loadstone::test
