// Compares lists of modules in configs with the names of quantized ones, by the rules of the
// libraries that read them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/config_claim.h"

namespace loadstone {

// Quantized modules that a list excludes.
struct LeftPlain {
  std::vector<std::string> entries;  // those that match, or all of a list of quantized modules
  std::vector<std::string> modules;
  bool is_lacking = false;  // no entry matches the modules, and one should

  // Entries that cannot be compared, if other modules depend on them.
  std::vector<std::string> unread;
  std::string reason;  // of the first
};

// Returns the modules that a reader of the list leaves plain; empty for an unknown list. If an
// entry of a list of targets matches no module, the list counts only for modules whose siblings it
// names: a library may use other names. Expressions that need more than RE2 are unread, unless no
// module matches without their look-around; all are unread if they would take long. The known
// classes are Linear, Embedding and Module; patterns are not compared with names that are not
// ASCII.
[[nodiscard]] LeftPlain left_plain(const ConfigList& list,
                                   std::span<const std::string_view> modules);

}  // namespace loadstone
