// Hash tables for untrusted names.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "loadstone/export.h"

namespace loadstone {

// A hash with a random seed per process: with a fixed one, a file could contain a million names
// that fall into one bucket, and a table of them takes hours. The order of iteration differs
// between processes, so nothing may depend on it. Thread-safe.
struct LOADSTONE_API NameHash {
  using is_transparent = void;
  // Not noexcept, although it never throws: libstdc++ then stores each name's hash in the table,
  // and growing it does not hash all names again.
  [[nodiscard]] std::size_t operator()(std::string_view name) const;
};

// The owner of the names must outlive the table.
template <typename Value>
using NameMap = std::unordered_map<std::string_view, Value, NameHash, std::equal_to<>>;
using NameSet = std::unordered_set<std::string_view, NameHash, std::equal_to<>>;

}  // namespace loadstone
