// Declares Error, the only exception type of loadstone, and the error codes.
//
// A code is a stable dotted name: the format or area, then the violated rule ("st.hole",
// "io.short_read"). loadstone reports problems with the tensors of a plan as Findings (finding.h)
// instead of errors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

// Location of an error. Unknown members stay empty.
struct Where {
  std::string path{};    // file
  std::string tensor{};  // tensor name or metadata key
  std::string field{};   // header field, JSON field or option
  std::string found{};
  std::string expected{};
  std::optional<std::uint64_t> byte_offset{};  // from the start of the file
  int system_error = 0;                        // errno
};

// An error of loadstone. what() is one line with all known facts: file, tensor, field, message,
// found, expected, offset, system error, and finally [code]. Control characters in names are
// escaped. No member contains the query, fragment, user or password of a URL. Value type; copying
// it allocates memory.
class LOADSTONE_API Error : public std::runtime_error {
 public:
  // `code`: one of all_codes().
  Error(std::string code, std::string message, Where where = {}, std::vector<Error> others = {});

  [[nodiscard]] const std::string& code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  [[nodiscard]] const Where& where() const noexcept { return where_; }
  // Returns the errors of further files: open_checkpoint() examines all files of a checkpoint.
  [[nodiscard]] const std::vector<Error>& others() const noexcept;

 private:
  std::string code_;
  std::string message_;
  Where where_;
  std::shared_ptr<const std::vector<Error>> others_;  // null: none
};

struct CodeInfo {
  std::string_view code;
  std::string_view meaning;
  std::string_view advice;  // next step for the user
};

// Returns every code that loadstone can report, sorted.
[[nodiscard]] LOADSTONE_API std::span<const CodeInfo> all_codes() noexcept;
// Returns the description of a code, or null if it is unknown. It lives as long as the program.
[[nodiscard]] LOADSTONE_API const CodeInfo* find_code(std::string_view code) noexcept;

// Returns the command's exit status for a code: 1 found a problem, 2 wrong usage, 3 invalid file,
// 4 input/output error, 5 not enough memory, 130 interrupted.
[[nodiscard]] LOADSTONE_API int exit_status(std::string_view code) noexcept;

}  // namespace loadstone
