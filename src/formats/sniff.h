// The kind of a file by its first bytes, so that errors name error pages, partial downloads and
// renamed archives instead of the first rule that they violate.
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
  legacy_ggml,  // ggml, ggmf, ggjt: before GGUF
  torch_zip,    // any zip archive; torch.save writes one
  torch_pickle,
  archive,  // gzip, xz, zstd, bzip2, 7z
  hdf5,
  git_lfs_pointer,
  html,
  text,
  zeros,
};

// "an HTML page" ...
[[nodiscard]] std::string_view describe(FileKind kind) noexcept;

// 512 bytes, or all bytes of a smaller file, are enough.
[[nodiscard]] FileKind sniff(std::span<const std::byte> beginning,
                             std::uint64_t file_bytes) noexcept;

// Reads the start of a file: 9 bytes of a known format, more of any other.
[[nodiscard]] FileKind sniff(ByteSource& source);

}  // namespace loadstone
