// Writes importance matrices in both of llama.cpp's formats.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/files.h"

namespace loadstone::test {

// Returns an entry of the older format, which is not GGUF. Each argument can be made invalid.
[[nodiscard]] inline std::string imatrix_entry(std::string_view name, std::int32_t calls,
                                               const std::vector<float>& numbers) {
  return raw(static_cast<std::int32_t>(name.size())) + std::string(name) + raw(calls) +
         raw(static_cast<std::int32_t>(numbers.size())) + raw_all(numbers);
}

[[nodiscard]] inline std::string imatrix_end(std::int32_t chunks, std::string_view dataset) {
  return raw(chunks) + raw(static_cast<std::int32_t>(dataset.size())) + std::string(dataset);
}

// Writes the keys that mark a GGUF file as an importance matrix.
[[nodiscard]] inline GgufWriter imatrix_keys(std::uint32_t chunks, std::string_view dataset) {
  GgufWriter writer;
  writer.entry_text("general.type", "imatrix")
      .entry("imatrix.datasets", GgufWriter::array,
             raw(GgufWriter::string) + raw(std::uint64_t{1}) + GgufWriter::text(dataset))
      .entry_number("imatrix.chunk_count", GgufWriter::u32, chunks)
      .entry_number("imatrix.chunk_size", GgufWriter::u32, std::uint32_t{512});
  return writer;
}

// Adds the sums of one matrix, or of a stack with one count for each of its matrices.
inline void add_imatrix_entry(GgufWriter& writer, const std::string& name,
                              const std::vector<float>& sums, const std::vector<float>& counts) {
  const std::uint64_t matrices = counts.size();
  const std::uint64_t columns = counts.empty() ? sums.size() : sums.size() / counts.size();
  writer.tensor(name + ".in_sum2", {columns, matrices}, 0, raw_all(sums));
  writer.tensor(name + ".counts", {1, matrices}, 0, raw_all(counts));
}

}  // namespace loadstone::test
