#include "plan/suggested_rule.h"

#include <cctype>
#include <cstddef>
#include <vector>

#include "base/json_writer.h"
#include "base/text.h"

namespace loadstone {

namespace {

constexpr std::size_t template_groups_max = 9;  // templates know $1 to $9

// Runs of digits and of other characters, in turn.
std::vector<std::string_view> runs_of(std::string_view name) {
  std::vector<std::string_view> runs;
  while (!name.empty()) {
    const bool is_number = is_digit(name.front());
    std::size_t end = 1;
    while (end < name.size() && is_digit(name[end]) == is_number) ++end;
    runs.push_back(name.substr(0, end));
    name.remove_prefix(end);
  }
  return runs;
}

std::vector<std::string_view> numbers_of(const std::vector<std::string_view>& runs) {
  std::vector<std::string_view> numbers;
  for (const std::string_view run : runs) {
    if (is_digits(run)) numbers.push_back(run);
  }
  return numbers;
}

std::string pattern_of(std::string_view text) {
  std::string pattern;
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (byte < 0x80 && std::ispunct(byte) != 0 && character != '_') pattern += '\\';
    pattern += character;
  }
  return pattern;
}

std::string template_of(std::string_view text) {
  std::string made;
  for (const char character : text) made += character == '$' ? "$$" : std::string(1, character);
  return made;
}

}  // namespace

std::string suggested_rule(std::string_view source, std::string_view target) {
  const auto source_runs = runs_of(source);
  const auto target_runs = runs_of(target);
  const auto numbers = numbers_of(source_runs);
  const bool is_general =
      numbers == numbers_of(target_runs) && numbers.size() <= template_groups_max;
  std::string pattern;
  for (const std::string_view run : source_runs) {
    pattern += is_general && is_digits(run) ? "(\\d+)" : pattern_of(run);
  }
  std::string made;
  std::size_t group = 0;
  for (const std::string_view run : target_runs) {
    made += is_general && is_digits(run) ? "$" + std::to_string(++group) : template_of(run);
  }
  JsonWriter json;
  json.begin_object();
  json.member("op", "rename");
  json.member("sources", std::vector<std::string>{pattern});
  json.member("targets", std::vector<std::string>{made});
  json.end_object();
  return json.take();
}

}  // namespace loadstone
