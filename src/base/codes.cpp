// Every code that loadstone can say. A test checks that the list is sorted and that every code that
// stands in the sources stands here.
#include <array>

#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr auto codes = std::to_array<CodeInfo>({
    {"audit.on_meta", "A tensor has no memory and no exception names it.",
     "Load again; if it stays, the plan's findings say which source is missing."},
    {"audit.unaccounted", "A tensor has a value whose origin is not known.",
     "Find who wrote it after the load, or load it through loadstone."},
    {"cancelled", "The load was stopped by its caller.", "Nothing was changed; start it again."},
    {"internal", "A defect of loadstone itself.", "Please report it with the message."},
});

}  // namespace

std::span<const CodeInfo> all_codes() noexcept { return codes; }

}  // namespace loadstone
