// Functions that return a thrown error.
#pragma once

#include <gmock/gmock.h>

#include <optional>
#include <string>

#include "loadstone/error.h"

namespace loadstone::test {

// Returns the Error that `call` throws, or nullopt. Other exceptions pass.
template <typename Call>
[[nodiscard]] std::optional<Error> error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// Returns the code of the Error that `call` throws, or "".
template <typename Call>
[[nodiscard]] std::string code_of(Call&& call) {
  const auto error = error_of(call);
  return error ? error->code() : "";
}

}  // namespace loadstone::test
