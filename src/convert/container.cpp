#include "convert/container.h"

#include <fmt/format.h>

#include <array>

#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

const Container& container_of(FileFormat format) {
  for (const Container* const each : containers()) {
    if (each->format() == format) return *each;
  }
  throw Error("plan.options", "this version does not write files of that format",
              {.field = "format"});
}

std::span<const Container* const> containers() noexcept {
  static const std::array all = {&safetensors_container, &gguf_container};
  return all;
}

void report_left_out(const std::vector<std::string>& keys, std::string_view reason,
                     std::vector<Finding>& findings) {
  if (keys.empty()) return;
  findings.push_back(
      {.severity = Severity::info,
       .code = "convert.metadata",
       .sources = keys,
       .message = fmt::format("{} values of metadata {} and are left out: '{}'{}", keys.size(),
                              reason, printable(keys.front()), keys.size() > 1 ? " ..." : "")});
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
