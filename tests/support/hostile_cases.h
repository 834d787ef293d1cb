// Reads the cases of tests/hostile/manifest.json.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone::test {

struct HostileCase {
  std::string name;
  std::string format;   // "safetensors", "sharded", "gguf", "torch" ...
  std::string path;     // absolute
  std::string accept;   // "yes", "no", "warn"
  std::string field;    // text that the error's message contains; "-" if none
  std::string culprit;  // text that the error's message contains
  std::string expect;   // the code; "-" if none
};

// Returns all cases in the manifest's order.
[[nodiscard]] const std::vector<HostileCase>& hostile_cases();
// Returns valid files that contain damaged quantized weights.
[[nodiscard]] const std::vector<HostileCase>& quantized_cases();
// Returns cases of quantization methods that loadstone does not support. Tests check only that the
// files do no harm, not the manifest's expectations.
[[nodiscard]] const std::vector<HostileCase>& unread_cases();

// Returns true if opening the file cannot find the error, because it depends on a tensor's values.
[[nodiscard]] bool needs_values(std::string_view code);
// Returns true for rules that loadstone does not check, such as checksums inside an archive.
[[nodiscard]] bool is_not_looked_at(std::string_view code);
[[nodiscard]] bool needs_model(std::string_view code);

// Returns true for codes of byte-swapped or compressed files, which loadstone rejects but other
// readers may accept.
[[nodiscard]] bool is_never_read(std::string_view code);

}  // namespace loadstone::test
