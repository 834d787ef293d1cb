// Describes a failed check. The caller of the check adds the code and the name of the file or
// target.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "loadstone/error.h"
#include "loadstone/finding.h"

namespace loadstone {

struct Problem {
  std::string message;
  std::string found{};
  std::string expected{};
  std::string field{};               // the invalid field, such as "terms[2].left"
  std::optional<std::size_t> box{};  // index of the invalid box
};

// Throws the problem as an Error. A field in `where` replaces the field of the problem.
[[noreturn]] void throw_problem(std::string code, const Problem& problem, Where where = {});

// Returns `finding` with the problem's field and message appended to its message.
[[nodiscard]] Finding with_problem(Finding finding, const Problem& problem);

}  // namespace loadstone
