#include "formats/torch_pickle.h"

#include <fmt/format.h>

#include "base/named.h"
#include "base/text.h"

namespace loadstone {

void CopyBudget::take(const std::string& path, std::uint64_t bytes, std::uint64_t pickle_bytes) {
  spent_ += bytes;  // each call adds at most 2^32, so the error comes before an overflow
  if (spent_ <= bytes_per_pickle_byte * pickle_bytes + bytes_least) return;
  refuse(path, {"pt.budget", "the pickle repeats strings and lists too often", "data.pkl",
                fmt::format("more than {} copied bytes for each of its {}", bytes_per_pickle_byte,
                            bytes_text(pickle_bytes)),
                "names, shapes and pairs that are stored where they are used"});
}

std::string_view Pickle::text(std::uint32_t index) const {
  const PickleNode& found = nodes[index];
  return std::string_view(texts).substr(static_cast<std::size_t>(found.number), found.text_bytes);
}

std::string_view Pickle::callee(std::uint32_t index) const {
  const bool is_made = kind(index) == PickleKind::call || kind(index) == PickleKind::object;
  return is_made ? text(items(index).front()) : std::string_view();
}

bool Pickle::is_foreign(std::uint32_t index) const {
  const bool is_made = kind(index) == PickleKind::call || kind(index) == PickleKind::object;
  return is_made && !is_tensor_maker(callee(index));
}

std::string Pickle::describe(std::uint32_t index) const {
  constexpr std::string_view names[] = {
      "None",      "a boolean", "an integer", "an integer beyond 64 bits",
      "a float",   "a text",    "bytes",      "a global",
      "a list",    "a tuple",   "a set",      "a dict",
      "a storage", "a call",    "an object"};
  switch (kind(index)) {
    case PickleKind::boolean:
      return nodes[index].number != 0 ? "True" : "False";
    case PickleKind::integer:
      return std::to_string(nodes[index].number);
    case PickleKind::text:
      return "the string '" + printable(text(index)) + "'";
    case PickleKind::global:
      return printable(text(index));
    case PickleKind::call:
    case PickleKind::object:
      return std::string(name_among(names, kind(index))) + " of " + printable(callee(index));
    default:
      return std::string(name_among(names, kind(index)));
  }
}

std::optional<std::string> problem_of_storage_id(const Pickle& pickle, std::uint32_t id) {
  if (pickle.kind(id) != PickleKind::tuple) return pickle.describe(id);
  const std::vector<std::uint32_t>& parts = pickle.items(id);
  if (parts.size() < 5 || parts.size() > 6) return fmt::format("a tuple of {}", parts.size());
  const auto is = [&](std::size_t part, PickleKind kind) {
    return pickle.kind(parts[part]) == kind;
  };
  if (!is(0, PickleKind::text) || pickle.text(parts[0]) != "storage") {
    return pickle.describe(parts[0]);
  }
  if (!is(1, PickleKind::global) || !is(2, PickleKind::text) || !is(4, PickleKind::integer)) {
    return fmt::format("{}, {}, {}", pickle.describe(parts[1]), pickle.describe(parts[2]),
                       pickle.describe(parts[4]));
  }
  if (parts.size() == 6 && !is(5, PickleKind::none)) return "a view of another storage";
  return std::nullopt;
}

bool is_tensor_maker(std::string_view global) noexcept {
  return global.starts_with("torch._utils._rebuild_") ||
         global.starts_with("torch._tensor._rebuild_");
}

}  // namespace loadstone
