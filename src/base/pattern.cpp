#include "base/pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::size_t pattern_bytes_max = 4096;
constexpr std::size_t patterns_max = 10'000;
constexpr std::size_t patterns_listed_max = 20;

}  // namespace

std::int64_t pattern_memory(std::size_t patterns) noexcept {
  constexpr std::int64_t one_max = 4 << 20;
  const auto count = static_cast<std::int64_t>(std::max<std::size_t>(patterns, 1));
  return std::min(one_max, patterns_memory_max / count);
}

Pattern compile_pattern(std::string_view text, const char* code, std::string field,
                        std::int64_t memory_max) {
  if (text.size() > pattern_bytes_max) {
    throw Error(code, "the pattern is too long",
                {.field = std::move(field),
                 .found = counted(text.size(), "byte"),
                 .expected = fmt::format("at most {}", pattern_bytes_max)});
  }
  re2::RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(memory_max);
  // Names may be invalid UTF-8, and '.' must match their bytes too.
  if (!is_utf8(text)) options.set_encoding(re2::RE2::Options::EncodingLatin1);
  auto pattern = std::make_unique<const re2::RE2>(piece(text), options);
  if (pattern->ok()) return pattern;
  throw Error(code, "the pattern is not a valid regular expression: " + pattern->error(),
              {.field = std::move(field), .found = printable(text)});
}

bool is_in(const re2::RE2& pattern, std::string_view name) {
  return re2::RE2::PartialMatch(piece(name), pattern);
}

NamePatterns::NamePatterns(const std::vector<std::string>& texts, const std::string& field) {
  if (texts.size() > patterns_max) {
    throw Error("plan.options", "too many patterns",
                {.field = field,
                 .found = std::to_string(texts.size()),
                 .expected = fmt::format("at most {}", patterns_max)});
  }
  const std::int64_t memory = pattern_memory(texts.size());
  for (const std::string& text : texts) {
    patterns_.push_back(compile_pattern(text, "plan.options", field, memory));
  }
}

std::optional<std::size_t> NamePatterns::first_match(std::string_view name) const {
  for (std::size_t i = 0; i < patterns_.size(); ++i) {
    if (re2::RE2::FullMatch(piece(name), *patterns_[i])) return i;
  }
  return std::nullopt;
}

std::vector<std::string> NamePatterns::texts() const {
  std::vector<std::string> texts;
  for (const Pattern& pattern : patterns_) texts.push_back(pattern->pattern());
  return texts;
}

std::string counts_text(const std::vector<std::string>& patterns,
                        const std::vector<std::size_t>& counts) {
  std::string text;
  for (std::size_t i = 0; i < std::min(patterns.size(), patterns_listed_max); ++i) {
    text += fmt::format("{}'{}' {}", i == 0 ? "" : ", ", printable(patterns[i]),
                        counts[i] == 0 ? "none" : counted(counts[i], "name"));
  }
  const std::size_t more = patterns.size() - std::min(patterns.size(), patterns_listed_max);
  return more == 0 ? text : text + fmt::format(", and so on ({} more)", more);
}

}  // namespace loadstone
