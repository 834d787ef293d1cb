// Types of GGUF metadata keys: the keys that the format defines, and common keys of architectures.
#pragma once

#include <string>
#include <string_view>

#include "loadstone/catalog.h"

namespace loadstone {

inline constexpr const char* gguf_architecture_key = "general.architecture";

struct GgufKey {
  // The key; "*.NAME" for the keys of all architectures, such as "llama.NAME".
  std::string_view key;
  MetadataType type;
  MetadataType items = MetadataType::u8;  // type of an array's elements

  // True if ggml rejects any other type. A key of an architecture may also be an array, with one
  // value per layer.
  [[nodiscard]] bool is_fixed() const noexcept { return !key.starts_with('*'); }
  [[nodiscard]] bool fits(const MetadataValue& item) const noexcept;
  // Returns "u32", "array of f32" ...
  [[nodiscard]] std::string type_text() const;
};

// Returns null for an unknown key.
[[nodiscard]] const GgufKey* find_gguf_key(std::string_view key) noexcept;

}  // namespace loadstone
