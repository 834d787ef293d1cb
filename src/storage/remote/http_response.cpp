#include "storage/remote/http_response.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <limits>
#include <system_error>
#include <utility>

namespace loadstone {

namespace {

std::string_view trimmed(std::string_view text) noexcept {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

bool equals_name(std::string_view text, std::string_view lower) noexcept {
  return std::ranges::equal(text, lower,
                            [](unsigned char a, unsigned char b) { return std::tolower(a) == b; });
}

std::optional<std::uint64_t> parse_u64(std::string_view text) noexcept {
  std::uint64_t number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = problem == std::errc() && end == text.data() + text.size();
  return is_number && !text.empty() ? std::optional(number) : std::nullopt;
}

// Parses Retry-After. Ignores dates, for which the usual delays apply.
std::optional<std::uint32_t> seconds_of(std::string_view text) {
  const auto seconds = parse_u64(text);
  if (!seconds) return std::nullopt;
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(*seconds, std::numeric_limits<std::uint32_t>::max()));
}

// Returns the encoding for messages. Hides unknown text, which may contain secrets of the request.
std::string known_encoding(std::string_view text) {
  constexpr std::array<std::string_view, 8> known = {"",   "identity", "gzip",     "x-gzip",
                                                     "br", "deflate",  "compress", "zstd"};
  const bool is_known = std::ranges::find(known, text) != known.end();
  return is_known ? std::string(text) : "an unknown encoding";
}

}  // namespace

bool is_plain(const HttpResponse& response) noexcept {
  return response.content_encoding.empty() || response.content_encoding == "identity";
}

bool is_temporary(long status) noexcept {
  return status == 408 || status == 429 || status == 500 || status == 502 || status == 503 ||
         status == 504;
}

bool is_redirect(long status) noexcept {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

std::optional<ContentRange> parse_content_range(std::string_view text) {
  constexpr std::string_view unit = "bytes ";
  if (text.size() < unit.size() || !equals_name(text.substr(0, unit.size()), unit)) {
    return std::nullopt;
  }
  text = trimmed(text.substr(unit.size()));
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  ContentRange range;
  const std::string_view total = text.substr(slash + 1);
  if (total != "*") {
    range.total = parse_u64(total);
    if (!range.total) return std::nullopt;
  }
  const std::string_view bytes = text.substr(0, slash);
  if (bytes == "*") return range;
  const std::size_t dash = bytes.find('-');
  if (dash == std::string_view::npos) return std::nullopt;
  range.begin = parse_u64(bytes.substr(0, dash));
  const auto last = parse_u64(bytes.substr(dash + 1));
  const bool is_range = range.begin && last && *range.begin <= *last &&
                        *last != std::numeric_limits<std::uint64_t>::max();
  if (!is_range) return std::nullopt;
  range.end = *last + 1;
  return range;
}

void HttpResponse::take_line(std::string_view line) {
  line = trimmed(line);
  if (line.starts_with("HTTP/")) {
    *this = {};
    const std::string_view rest = trimmed(line.substr(std::min(line.find(' '), line.size())));
    std::from_chars(rest.data(), rest.data() + std::min<std::size_t>(rest.size(), 3), status);
    return;
  }
  const std::size_t colon = line.find(':');
  if (colon == std::string_view::npos) return;
  const std::string_view name = line.substr(0, colon);
  const std::string_view value = trimmed(line.substr(colon + 1));
  const std::array<std::pair<std::string_view, std::string*>, 8> texts = {{
      {"content-range", &content_range_text},
      {"etag", &etag},
      {"last-modified", &last_modified},
      {"location", &location},
      {"link", &link},
      {"x-repo-commit", &commit},
      {"x-linked-etag", &linked_etag},
      {"x-error-code", &error_code},
  }};
  for (const auto& [known, text] : texts) {
    if (equals_name(name, known)) *text = value;
  }
  if (equals_name(name, "content-range")) content_range = parse_content_range(value);
  if (equals_name(name, "content-encoding")) content_encoding = known_encoding(value);
  if (equals_name(name, "content-length")) content_length = parse_u64(value);
  if (equals_name(name, "retry-after")) retry_after_seconds = seconds_of(value);
}

}  // namespace loadstone
