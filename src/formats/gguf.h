// The GGUF format, versions 2 and 3: counts, metadata, tensor infos, padding, data.
// Rules and codes: docs/formats/gguf.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

// Metadata of any file stays far below this; what says more is not believed.
inline constexpr std::uint64_t gguf_item_bytes_max = std::uint64_t{512} << 20;

struct GgufType {
  std::uint32_t id;
  std::string_view name;
  std::optional<Encoding> encoding;  // nothing: the type was removed from the format
};

// Nothing for ids that never were a type.
[[nodiscard]] std::optional<GgufType> gguf_type(std::uint32_t id) noexcept;

// Reads everything before the data, not a byte of data, and checks every rule of one file. Throws
// Error "gg.*", "io.*". Whether a split is complete is for the caller, who knows the other files.
// `rank_max`: more dims than these are refused.
[[nodiscard]] FileHeader read_gguf(ByteSource& source, std::uint32_t rank_max = 4);

// What a part of a split says about itself; nothing for a file that is whole. Throws "gg.kv_type",
// "gg.split".
struct GgufSplit {
  std::uint64_t number = 0;  // from 0
  std::uint64_t count = 0;
  std::optional<std::uint64_t> tensors;  // in all parts together
};
[[nodiscard]] std::optional<GgufSplit> gguf_split(const FileHeader& header);

}  // namespace loadstone
