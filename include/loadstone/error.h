// The only exception of loadstone, and its codes.
//
// A code is a stable dotted name: the format or area, then the violated rule ("st.hole",
// "io.short_read"). Problems of a plan's tensors are Findings (finding.h), not errors.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "loadstone/export.h"

namespace loadstone {

// Location of an error. Unknown members stay empty.
struct Where {
  std::string path{};    // file
  std::string tensor{};  // tensor or metadata key
  std::string field{};   // header field, JSON field, option
  std::string found{};
  std::string expected{};
  std::optional<std::uint64_t> byte_offset{};  // from the start of the file
  int system_error = 0;                        // errno
};

// what() is one line with all known facts: file, tensor, field, message, found, expected, offset,
// system error, and finally [code]. Control characters in names are escaped. No member contains a
// URL's query, fragment, user or password. Value type; a copy takes memory.
class LOADSTONE_API Error : public std::runtime_error {
 public:
  // `code`: one of all_codes().
  Error(std::string code, std::string message, Where where = {});

  [[nodiscard]] const std::string& code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  [[nodiscard]] const Where& where() const noexcept { return where_; }

 private:
  std::string code_;
  std::string message_;
  Where where_;
};

struct CodeInfo {
  std::string_view code;
  std::string_view meaning;
  std::string_view advice;  // next step for the user
};

// Every code that loadstone can report, sorted by code.
[[nodiscard]] LOADSTONE_API std::span<const CodeInfo> all_codes() noexcept;
// Returns the description of a code, or null if it is unknown. It lives as long as the program.
[[nodiscard]] LOADSTONE_API const CodeInfo* find_code(std::string_view code) noexcept;

// Returns the command's exit status for a code: 1 found something, 2 wrong usage, 3 bad file,
// 4 input/output, 5 does not fit in memory, 130 interrupted.
[[nodiscard]] LOADSTONE_API int exit_status(std::string_view code) noexcept;

}  // namespace loadstone
