// Parses the header lines of a response that determine its body.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace loadstone {

// A range such as "bytes 0-9/100" or "bytes */100".
struct ContentRange {
  std::optional<std::uint64_t> begin;
  std::uint64_t end = 0;               // one past the last byte
  std::optional<std::uint64_t> total;  // size of the file

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
  std::string link;  // refers to further pages of a list
  std::optional<std::uint32_t> retry_after_seconds;
  // The commit that a model hub reports.
  std::string commit;
  std::string linked_etag;  // tag of the file to which the response redirects
  std::string error_code;

  // Reads a header line, which includes its line ending. The first line of a response resets the
  // fields of an earlier response.
  void take_line(std::string_view line);
  // Returns a version that distinguishes this file from a later one of the same name; empty if
  // unknown.
  [[nodiscard]] const std::string& version() const noexcept {
    return etag.empty() ? last_modified : etag;
  }
};

[[nodiscard]] bool is_plain(const HttpResponse& response) noexcept;
// Returns true for statuses of errors that may disappear soon.
[[nodiscard]] bool is_temporary(long status) noexcept;
[[nodiscard]] bool is_redirect(long status) noexcept;

}  // namespace loadstone
