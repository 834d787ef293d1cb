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
  std::string field;    // "-" if none
  std::string culprit;  // text that the message must contain
  std::string expect;   // the code; "-" if none
};

// In the manifest's order.
[[nodiscard]] const std::vector<HostileCase>& hostile_cases();
// Valid files with damaged quantized weights.
[[nodiscard]] const std::vector<HostileCase>& quantized_cases();
// Cases of quantization methods that loadstone does not read yet: only their harmlessness is
// tested, not the manifest's expectations.
[[nodiscard]] const std::vector<HostileCase>& unread_cases();

// Codes that need a tensor's values or a model, so opening the file cannot find them.
[[nodiscard]] bool needs_values(std::string_view code);
// Rules without a check yet: checksums inside an archive.
[[nodiscard]] bool is_not_looked_at(std::string_view code);
[[nodiscard]] bool needs_model(std::string_view code);

// Codes of files that other readers may swap or unpack, and that loadstone rejects by name.
[[nodiscard]] bool is_never_read(std::string_view code);

}  // namespace loadstone::test
