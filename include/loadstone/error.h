// The one exception of loadstone, and what its codes mean.
//
// A code is a stable dotted word: the format or area, then the rule that was broken ("st.hole",
// "io.short_read"). What a plan has to say about tensors is not an error but a Finding (finding.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "loadstone/export.h"

namespace loadstone {

// Where something went wrong. What is not known stays empty.
struct Where {
  std::string path{};    // file
  std::string tensor{};  // tensor or metadata key
  std::string field{};   // header field, JSON field, option
  std::string found{};
  std::string expected{};
  std::optional<std::uint64_t> byte_offset{};  // from the start of the file
  int system_error = 0;                        // errno
};

// what() is one line that holds everything known: file, tensor, field, message, found, expected,
// offset, system error, and [code] at its end. Control characters in names are escaped. No member
// holds a URL's query, fragment, user or password.
// Value type; a copy takes memory.
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
  std::string_view advice;  // what to do about it
};

// Every code that loadstone can say, sorted by code.
[[nodiscard]] LOADSTONE_API std::span<const CodeInfo> all_codes() noexcept;
// Null for a code that is not among them. It lives as long as the program.
[[nodiscard]] LOADSTONE_API const CodeInfo* find_code(std::string_view code) noexcept;

// The command line's exit status for a code: 1 found something, 3 bad file, 4 input/output,
// 5 does not fit in memory, 130 interrupted; 2 is wrong usage.
[[nodiscard]] LOADSTONE_API int exit_status(std::string_view code) noexcept;

}  // namespace loadstone
