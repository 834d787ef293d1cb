// Texts that are compared with files of tests/golden/json, and what a reader says of changed ones.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace loadstone::test {

// Fails if tests/golden/json/NAME has another text. With LOADSTONE_WRITE_GOLDENS in the
// environment, writes the file.
void expect_golden(const std::string& name, const std::string& text);

// What `read` throws for each change of one value in the JSON text: removed, written twice,
// replaced by values of other types; and for one more member in each object. A line for each place.
[[nodiscard]] std::string errors_of(std::string_view text, std::string_view code,
                                    const std::function<void(const std::string&)>& read);

}  // namespace loadstone::test
