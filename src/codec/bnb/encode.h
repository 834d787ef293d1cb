// Weights of bitsandbytes as they are written.
#pragma once

#include <span>

#include "codec/encode.h"

namespace loadstone {

[[nodiscard]] std::span<const WrittenEncoding> bnb_written() noexcept;

}  // namespace loadstone
