// Hash tables whose keys are names from untrusted files.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "loadstone/export.h"

namespace loadstone {

// A hash with a random seed per process. With a fixed seed, a file could contain a million names
// that fall into one bucket, and filling a table with them would take hours. The order of iteration
// differs between processes, so no result may depend on it. Thread-safe.
struct LOADSTONE_API NameHash {
  using is_transparent = void;
  // Deliberately not noexcept, although it never throws: libstdc++ then stores each name's hash in
  // the table, and does not compute all hashes again when the table grows.
  [[nodiscard]] std::size_t operator()(std::string_view name) const;
};

// A table of views of names, which must outlive it.
template <typename Value>
using NameMap = std::unordered_map<std::string_view, Value, NameHash, std::equal_to<>>;
using NameSet = std::unordered_set<std::string_view, NameHash, std::equal_to<>>;

}  // namespace loadstone
