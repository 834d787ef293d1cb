// Numbers to blocks of GGUF. docs/formats/gguf-blocks.md
#pragma once

#include <span>
#include <string_view>

#include "codec/encode.h"

namespace loadstone {

[[nodiscard]] std::span<const WrittenEncoding> gguf_written() noexcept;
// Their names, and those of blocks that are only read.
[[nodiscard]] std::span<const std::string_view> gguf_encodings() noexcept;

}  // namespace loadstone
