// Tables of names that strangers choose.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "loadstone/export.h"

namespace loadstone {

// A hash with a random seed for each process: with a fixed one, a file can hold a million names
// that all fall into one bucket, and a table of them takes hours. The order of a table's iteration
// is another in each process, so nothing may depend on it. Thread-safe.
struct LOADSTONE_API NameHash {
  using is_transparent = void;
  // It throws nothing, but is not noexcept: libstdc++ then keeps each name's hash in the table,
  // which so grows without hashing all names again.
  [[nodiscard]] std::size_t operator()(std::string_view name) const;
};

// The names' owner must outlive the table.
template <typename Value>
using NameMap = std::unordered_map<std::string_view, Value, NameHash, std::equal_to<>>;
using NameSet = std::unordered_set<std::string_view, NameHash, std::equal_to<>>;

}  // namespace loadstone
