// The GGUF format, versions 2 and 3: counts, metadata, tensor infos, padding, data. Version 3 is
// written.
// Rules and codes: docs/formats/gguf.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

// Real metadata is far smaller; a larger item is rejected.
inline constexpr std::uint64_t gguf_item_bytes_max = std::uint64_t{512} << 20;

// The limits of ggml. Longer keys and names, and more dims, are read with a warning or on request.
inline constexpr std::uint64_t gguf_key_bytes_max = 65535;
inline constexpr std::uint64_t ggml_name_bytes_max = 63;  // ggml stores 64 with a NUL
inline constexpr std::uint32_t ggml_rank_max = 4;
inline constexpr std::uint64_t gguf_alignment_usual = 32;

struct GgufType {
  std::uint32_t id;
  std::string_view name;
  std::optional<Encoding> encoding;  // nullopt: the type was removed from the format
};

// Types that no one can dequantize, so that no file holds weights of them.
[[nodiscard]] bool is_for_activations(Encoding encoding) noexcept;
// Returns nullopt for an id that was never a type.
[[nodiscard]] std::optional<GgufType> gguf_type(std::uint32_t id) noexcept;
// Returns nullopt if GGUF has no type for weights with this encoding.
[[nodiscard]] std::optional<std::uint32_t> gguf_type_id(Encoding encoding) noexcept;

// Returns true if GGUF allows this alignment, in bytes.
[[nodiscard]] bool is_gguf_alignment(std::uint64_t alignment) noexcept;

// Reads everything before the data, and checks every rule for one file. Throws Error "gg.*",
// "io.*". The caller, who knows the other files, checks that a split is complete. `rank_max`: the
// maximum number of dims.
[[nodiscard]] FileHeader read_gguf(ByteSource& source, std::uint32_t rank_max = ggml_rank_max);

// A tensor as its info in the header declares it.
struct GgufTensor {
  std::string_view name;
  Encoding encoding;  // one with a type id
  const Shape* shape;
  std::uint64_t offset;  // from the first byte of the data, a multiple of the alignment
};

// Returns all bytes before the data, in version 3, padded to the alignment. Throws Error
// "plan.options" for metadata that the format does not support: invalid keys, values that do not
// fit their type, arrays nested deeper than one level.
[[nodiscard]] std::string gguf_header(const Metadata& metadata, std::span<const GgufTensor> tensors,
                                      std::uint64_t alignment);

// Metadata of one part of a split; nullopt for a complete file. Throws "gg.kv_type", "gg.split".
struct GgufSplit {
  std::uint64_t number = 0;  // from 0
  std::uint64_t count = 0;
  std::optional<std::uint64_t> tensors;  // in all parts together
};
[[nodiscard]] std::optional<GgufSplit> gguf_split(const FileHeader& header);

}  // namespace loadstone
