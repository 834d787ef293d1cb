// Torch files byte by byte: pickles at the level of opcodes, and the surrounding zip archive.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone::test {

// Opcodes as text, for concatenation.
namespace pickle {

[[nodiscard]] std::string text(std::string_view text);
[[nodiscard]] std::string integer(std::int32_t number);
[[nodiscard]] std::string global(std::string_view module, std::string_view name);
[[nodiscard]] std::string tuple(const std::vector<std::string>& items);
[[nodiscard]] std::string list(const std::vector<std::string>& items);
// `items`: alternating keys and values.
[[nodiscard]] std::string dict(const std::vector<std::string>& items);
[[nodiscard]] std::string call(std::string_view module, std::string_view name,
                               const std::vector<std::string>& arguments);
[[nodiscard]] std::string storage(std::string_view type, std::string_view key, std::int32_t numel);

struct View {
  std::string_view type = "FloatStorage";
  std::string_view key = "0";
  std::int32_t numel = 4;
  std::int32_t offset = 0;
  std::vector<std::int32_t> size = {2, 2};
  std::vector<std::int32_t> stride = {2, 1};
};
[[nodiscard]] std::string tensor(const View& view);
[[nodiscard]] inline std::string tensor() { return tensor(View{}); }

// Adds the first and the last opcodes.
[[nodiscard]] std::string whole(const std::string& value);

}  // namespace pickle

struct ZipEntry {
  std::string name;
  std::string bytes;
  // False claims, for tests of the reader.
  std::string local_name = {};  // in place of `name`
  std::uint16_t method = 0;
  std::uint32_t header_shift = 0;  // added to its offset in the directory
  std::uint32_t bytes_more = 0;    // added to both sizes in the directory
};

struct ZipOptions {
  bool zip64 = false;
  std::string prefix = {};   // before the first record
  std::string comment = {};  // at the end
};

[[nodiscard]] std::string zip_bytes(const std::vector<ZipEntry>& entries,
                                    const ZipOptions& options = {});

// A checkpoint with this pickle and 16 bytes under data/0.
[[nodiscard]] std::string torch_bytes(const std::string& value);

}  // namespace loadstone::test
