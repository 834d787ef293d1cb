// Reads GGUF versions 2 and 3 and writes version 3. A file consists of counts, metadata, tensor
// infos, padding and data.
// Rules and error codes: docs/formats/gguf.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

// Size limit of a string or array. Real metadata is far smaller.
inline constexpr std::uint64_t gguf_item_bytes_max = std::uint64_t{512} << 20;

// Limits of ggml. loadstone reads longer keys and names with a warning, and more dims if the caller
// asks for them.
inline constexpr std::uint64_t gguf_key_bytes_max = 65535;
inline constexpr std::uint64_t ggml_name_bytes_max = 63;  // ggml stores 64 bytes with the NUL
inline constexpr std::uint32_t ggml_rank_max = 4;
// Key of the largest number of dims, a u32, in files that exceed ggml_rank_max.
inline constexpr const char* gguf_rank_key = "loadstone.rank_max";
// Returns true for keys that describe one file, not the model.
[[nodiscard]] constexpr bool is_gguf_file_key(std::string_view key) noexcept {
  return key.starts_with("split.") || key == gguf_rank_key;
}
inline constexpr std::uint64_t gguf_alignment_usual = 32;

struct GgufType {
  std::uint32_t id;
  std::string_view name;
  std::optional<Encoding> encoding;  // nullopt: the type was removed from the format
};

// Returns true for block formats of activations. ggml cannot dequantize them, so no file stores
// weights in them.
[[nodiscard]] bool is_for_activations(Encoding encoding) noexcept;
// Returns nullopt for an id that was never a type.
[[nodiscard]] std::optional<GgufType> gguf_type(std::uint32_t id) noexcept;
// Returns nullopt if GGUF has no type for weights with this encoding.
[[nodiscard]] std::optional<std::uint32_t> gguf_type_id(Encoding encoding) noexcept;

// Returns true if GGUF allows this alignment, in bytes.
[[nodiscard]] bool is_gguf_alignment(std::uint64_t alignment) noexcept;

// Reads everything before the data, and checks all rules that concern a single file. Throws Error
// "gg.*", "io.*". The caller checks that all parts of a split are present. `rank_max`: the maximum
// number of dims, unless the file declares a larger one under gguf_rank_key.
[[nodiscard]] FileHeader read_gguf(ByteSource& source, std::uint32_t rank_max = ggml_rank_max);

// A tensor info to be written.
struct GgufTensor {
  std::string_view name;
  Encoding encoding;  // must have a type id
  const Shape* shape;
  std::uint64_t offset;  // from the start of the data, a multiple of the alignment
};

// Returns all bytes before the data of a version 3 file, padded to the alignment. Throws Error
// "plan.options" for metadata that the format does not support: invalid keys, values that do not
// fit their type, arrays nested deeper than one level.
[[nodiscard]] std::string gguf_header(const Metadata& metadata, std::span<const GgufTensor> tensors,
                                      std::uint64_t alignment);

// Position of a file in a split.
struct GgufSplit {
  std::uint64_t number = 0;  // counted from 0
  std::uint64_t count = 0;
  std::optional<std::uint64_t> tensors;  // number of tensors in all parts
};
// Returns nullopt for a complete file. Throws Error "gg.kv_type", "gg.split".
[[nodiscard]] std::optional<GgufSplit> gguf_split(const FileHeader& header);

}  // namespace loadstone
