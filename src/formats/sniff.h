// What a file is, from its first bytes: error pages, half downloads and renamed archives are told
// by name instead of by the first rule that they happen to break.
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

// 512 bytes, or the whole of a smaller file, are enough.
[[nodiscard]] FileKind sniff(std::span<const std::byte> beginning,
                             std::uint64_t file_bytes) noexcept;

// Reads the beginning and tells: 9 bytes of a file in a known format, more of any other.
[[nodiscard]] FileKind sniff(ByteSource& source);

}  // namespace loadstone
