#include "base/problem.h"

#include <utility>

namespace loadstone {

void throw_problem(std::string code, const Problem& problem, Where where) {
  if (where.field.empty()) where.field = problem.field;
  where.found = problem.found;
  where.expected = problem.expected;
  throw Error(std::move(code), problem.message, std::move(where));
}

Finding with_problem(Finding finding, const Problem& problem) {
  if (!problem.field.empty()) finding.message += ": " + problem.field;
  finding.message += ": " + problem.message;
  finding.found = problem.found;
  finding.expected = problem.expected;
  return finding;
}

}  // namespace loadstone
