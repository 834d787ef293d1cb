// Comparison with the files of tests/golden/json, and a reader's errors for changed text.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace loadstone::test {

// Fails if tests/golden/json/NAME has a different text. With LOADSTONE_WRITE_GOLDENS in the
// environment, writes the file.
void expect_golden(const std::string& name, const std::string& text);

// Lists the errors of `read` for each change of one value in the JSON text: removed, duplicated,
// replaced by values of other types; and for an added member in each object. One line per place.
[[nodiscard]] std::string errors_of(std::string_view text, std::string_view code,
                                    const std::function<void(const std::string&)>& read);

}  // namespace loadstone::test
