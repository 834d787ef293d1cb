// Finds the kind of a file by its first bytes, so that errors name error pages, partial downloads
// and renamed archives instead of the first rule that they violate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "loadstone/storage.h"

namespace loadstone {

enum class FileKind : std::uint8_t {
  unknown,
  safetensors,
  gguf,
  legacy_ggml,  // the formats before GGUF: ggml, ggmf, ggjt
  torch_zip,    // any zip archive; torch.save writes zip archives
  torch_pickle,
  archive,  // gzip, xz, zstd, bzip2, 7z
  hdf5,
  git_lfs_pointer,
  html,
  text,
  zeros,
};

// Returns a phrase for messages, such as "an HTML page".
[[nodiscard]] std::string_view describe(FileKind kind) noexcept;

// `beginning`: the first 512 bytes, or all bytes of a smaller file.
[[nodiscard]] FileKind sniff(std::span<const std::byte> beginning,
                             std::uint64_t file_bytes) noexcept;

// Reads 9 bytes of a safetensors or GGUF file, and more of any other file.
[[nodiscard]] FileKind sniff(ByteSource& source);

}  // namespace loadstone
