// Writes torch files byte by byte: pickles from opcodes, and the zip archive around them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone::test {

// Each function returns opcodes as a string, for concatenation.
namespace pickle {

[[nodiscard]] std::string text(std::string_view text);
[[nodiscard]] std::string integer(std::int32_t number);
[[nodiscard]] std::string global(std::string_view module, std::string_view name);
[[nodiscard]] std::string tuple(const std::vector<std::string>& items);
[[nodiscard]] std::string list(const std::vector<std::string>& items);
// `items` contains alternating keys and values.
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
  // These fields make a record invalid, to test the reader.
  std::string local_name = {};  // in the record's header, in place of `name`
  std::uint16_t method = 0;
  std::uint32_t header_shift = 0;  // added to the header's offset in the directory
  std::uint32_t bytes_more = 0;    // added to both sizes in the directory
};

struct ZipOptions {
  bool zip64 = false;
  std::string prefix = {};   // bytes before the first record
  std::string comment = {};  // comment at the end of the archive
};

[[nodiscard]] std::string zip_bytes(const std::vector<ZipEntry>& entries,
                                    const ZipOptions& options = {});

// Returns a torch file with this value as its pickle, and 16 bytes in data/0.
[[nodiscard]] std::string torch_bytes(const std::string& value);

}  // namespace loadstone::test
