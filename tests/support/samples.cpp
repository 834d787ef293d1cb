#include "support/samples.h"

#include <algorithm>

#include "support/files.h"

namespace loadstone::test {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    names.push_back(entry.path().lexically_relative(folder).string());
  }
  std::ranges::sort(names);
  return names;
}

std::string mixed_file() {
  return safetensors_bytes({{"layers.0.q", "BF16", {96, 256}, some_bytes(96 * 256 * 2, 1)},
                            {"layers.0.k", "BF16", {32, 256}, some_bytes(32 * 256 * 2, 2)},
                            {"layers.1.q", "BF16", {96, 256}, some_bytes(96 * 256 * 2, 3)},
                            {"layers.1.k", "BF16", {32, 256}, some_bytes(32 * 256 * 2, 4)},
                            {"norm", "F32", {300, 301}, some_bytes(300 * 301 * 4, 5)},
                            {"ids", "I64", {1001}, some_bytes(8008, 6)},
                            {"mask", "BOOL", {3}, std::string("\0\1\0", 3)},
                            {"scale", "F8_E4M3", {40000}, some_bytes(40000, 7)},
                            {"block.nibbles", "F4", {2, 6}, some_bytes(6, 8)},
                            {"empty", "F16", {0, 4}, ""},
                            {"one", "F32", {}, some_bytes(4, 9)}},
                           {{"format", "pt"}, {"note", "a \"quoted\" note"}});
}

ConvertReport converted(const std::string& source, const std::string& target,
                        const ConvertOptions& options) {
  return convert(make_conversion(open_checkpoint(source), options), target);
}

}  // namespace loadstone::test
