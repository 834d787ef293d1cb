// The header lines of a response that determine its body.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace loadstone {

// "bytes 0-9/100", "bytes */100"
struct ContentRange {
  std::optional<std::uint64_t> begin;
  std::uint64_t end = 0;               // one past the last byte
  std::optional<std::uint64_t> total;  // of the file

  friend bool operator==(const ContentRange&, const ContentRange&) = default;
};

[[nodiscard]] std::optional<ContentRange> parse_content_range(std::string_view text);

struct HttpResponse {
  long status = 0;
  std::optional<std::uint64_t> content_length;
  std::string content_range_text;
  std::optional<ContentRange> content_range;
  std::string content_encoding;
  std::string etag;
  std::string last_modified;
  std::string location;
  std::string link;  // to further pages of a list
  std::optional<std::uint32_t> retry_after_seconds;
  // The commit that a model hub reports.
  std::string commit;
  std::string linked_etag;  // of the file that is redirected to
  std::string error_code;

  // A line with its end; the first line of a response resets the fields of an earlier one.
  void take_line(std::string_view line);
  // Distinguishes this file from a later one with the same name; empty: unknown.
  [[nodiscard]] const std::string& version() const noexcept {
    return etag.empty() ? last_modified : etag;
  }
};

[[nodiscard]] bool is_plain(const HttpResponse& response) noexcept;
// Answers that may be another a moment later.
[[nodiscard]] bool is_temporary(long status) noexcept;
[[nodiscard]] bool is_redirect(long status) noexcept;

}  // namespace loadstone
