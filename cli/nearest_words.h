// The known words nearest to one that is not known.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone::cli {

// "; nearest: a, b", at most three and best first; empty where none is near. A word that `typed` is
// the end of, behind a dot, counts as near as one with one wrong letter.
[[nodiscard]] std::string nearest_words(const std::string& typed,
                                        const std::vector<std::string_view>& known);

}  // namespace loadstone::cli
