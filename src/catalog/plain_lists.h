// Compares lists of modules in configs with the names of quantized modules, by the rules of the
// libraries that read the lists.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/config_claim.h"

namespace loadstone {

// Quantized modules that a list excludes.
struct LeftPlain {
  std::vector<std::string> entries;  // entries that match; all entries if is_lacking
  std::vector<std::string> modules;
  bool is_lacking = false;  // no entry matches the modules, and one should

  // Entries that cannot be compared, if the result for other modules depends on them.
  std::vector<std::string> unread;
  std::string reason;  // reason why the first unread entry cannot be compared
};

// Returns the modules that a reader of the list leaves unquantized; empty for an unknown list. If
// an entry of a list of targets matches no module, the library may use other names, so the list
// counts only for modules whose siblings it names. Expressions that RE2 does not support are
// unread, unless no module matches them without their look-around. All expressions are unread if
// they would take long. The known classes are Linear, Embedding and Module. Patterns are not
// compared with names that are not ASCII.
[[nodiscard]] LeftPlain left_plain(const ConfigList& list,
                                   std::span<const std::string_view> modules);

}  // namespace loadstone
