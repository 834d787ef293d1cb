// The cases of tests/hostile/manifest.json.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone::test {

struct HostileCase {
  std::string name;
  std::string format;   // "safetensors", "sharded", "gguf", "torch"
  std::string path;     // absolute
  std::string accept;   // "yes", "no", "warn"
  std::string field;    // "-" for none
  std::string culprit;  // text that the message must hold
  std::string expect;   // the code; "-" for none
};

// In the manifest's order.
[[nodiscard]] const std::vector<HostileCase>& hostile_cases();
// Files that are as they should be, and hold quantized weights that are not.
[[nodiscard]] const std::vector<HostileCase>& quantized_cases();
// Those of quantization methods that loadstone does not read yet: what the manifest expects of them
// is said by nobody, and that they do no harm is all that is tested.
[[nodiscard]] const std::vector<HostileCase>& unread_cases();

// Codes that need a tensor's values, or a model: opening the file does not find them.
[[nodiscard]] bool needs_values(std::string_view code);
// Rules of which nothing is said yet: checksums inside an archive.
[[nodiscard]] bool is_not_looked_at(std::string_view code);
[[nodiscard]] bool needs_model(std::string_view code);

// Codes of files that a reader may swap or unpack, and that we refuse by name.
[[nodiscard]] bool is_never_read(std::string_view code);

}  // namespace loadstone::test
