#pragma once

#include <string>
#include <utility>

#include "loadstone/error.h"

namespace loadstone {

[[noreturn]] inline void refuse_option(const char* field, std::string message,
                                       std::string found = {}, std::string expected = {}) {
  throw Error("plan.options", std::move(message),
              {.field = field, .found = std::move(found), .expected = std::move(expected)});
}

}  // namespace loadstone
