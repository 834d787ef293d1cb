// Reads and writes the safetensors format: 8 bytes of length, a JSON header, and the tensors' bytes
// without a gap. Rules and error codes: docs/formats/safetensors.md.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "formats/file_header.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"
#include "loadstone/storage.h"

namespace loadstone {

class JsonWriter;

// The format's limit on the size of a header.
inline constexpr std::uint64_t safetensors_header_bytes_max = 100'000'000;

// Reads the length and the header, but no data, and checks every rule. Throws Error "st.*", "io.*".
[[nodiscard]] FileHeader read_safetensors(ByteSource& source);

// A tensor in a header to be written. `begin` and `end` count from the end of the header.
struct SafetensorsEntry {
  std::string_view name;
  Dtype dtype = Dtype::u8;
  const Shape* shape = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

void write_entry(JsonWriter& json, const SafetensorsEntry& entry);
// Returns all bytes before the data.
[[nodiscard]] std::string safetensors_header(const std::map<std::string, std::string>& metadata,
                                             std::span<const SafetensorsEntry> entries);
// Returns false for names that a header cannot contain.
[[nodiscard]] bool is_safetensors_name(std::string_view name) noexcept;
// Returns true if loadstone writes tensor a before tensor b. Tensors with wider elements come
// first, which keeps every tensor aligned. Tensors of the same width are sorted by name.
[[nodiscard]] bool comes_first(Dtype dtype_a, std::string_view name_a, Dtype dtype_b,
                               std::string_view name_b) noexcept;

}  // namespace loadstone
