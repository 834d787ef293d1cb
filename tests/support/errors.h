// What a call throws, as something to look at.
#pragma once

#include <gmock/gmock.h>

#include <optional>
#include <string>

#include "loadstone/error.h"

namespace loadstone::test {

// The Error that `call` throws; nothing when it throws none. Other exceptions pass.
template <typename Call>
[[nodiscard]] std::optional<Error> error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// The code of it, "" for none.
template <typename Call>
[[nodiscard]] std::string code_of(Call&& call) {
  const auto error = error_of(call);
  return error ? error->code() : "";
}

}  // namespace loadstone::test
