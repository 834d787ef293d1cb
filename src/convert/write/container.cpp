#include "convert/write/container.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/refuse_option.h"
#include "base/text.h"
#include "base/words.h"

namespace loadstone {

const Container& container_of(FileFormat format) {
  for (const Container* const each : containers()) {
    if (each->format() == format) return *each;
  }
  refuse_option("format", "this version of loadstone does not write files of this format");
}

std::span<const Container* const> containers() noexcept {
  static const std::array all = {&safetensors_container, &gguf_container};
  return all;
}

// Returns true for metadata keys that affect what a model computes.
static bool is_of_model(std::string_view key) {
  return !starts_with_word(key, "general. tokenizer. quantize.");
}

void report_left_out(std::vector<std::string> keys, std::string_view reason,
                     std::vector<Finding>& findings) {
  if (keys.empty()) return;
  std::ranges::stable_partition(keys, is_of_model);
  std::string message =
      fmt::format("the output omits {}, because {}: {}", counted(keys.size(), "metadata value"),
                  reason, name_list(keys));
  const Severity severity = is_of_model(keys.front()) ? Severity::warning : Severity::info;
  findings.push_back({.severity = severity,
                      .code = "convert.metadata",
                      .sources = std::move(keys),
                      .message = std::move(message)});
}

bool Container::is_model_name(std::string_view name) const noexcept {
  return name.ends_with(suffix()) || (!index_suffix().empty() && name.ends_with(index_suffix()));
}

bool Container::is_output_name(std::string_view name, std::string_view stem) const {
  if (!name.starts_with(stem) || !is_model_name(name)) return false;
  std::string rest(name.substr(stem.size()));
  if (rest == suffix() || rest == index_suffix()) return true;
  for (char& character : rest) {
    if (is_digit(character)) character = '0';
  }
  return rest == "-00000-of-00000" + std::string(suffix());
}

std::string Container::shard_name(const std::string& stem, std::size_t index,
                                  std::size_t count) const {
  if (count == 1) return fmt::format("{}{}", stem, suffix());
  return fmt::format("{}-{:05}-of-{:05}{}", stem, index + 1, count, suffix());
}

}  // namespace loadstone
