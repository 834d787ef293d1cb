// Boxes and merges in a plan's JSON.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "loadstone/merge.h"

namespace loadstone {

// The numbers that sources and decodings have in the JSON, by their index in the plan.
struct PlanNumbers {
  std::unordered_map<std::uint32_t, std::uint32_t> sources;
  std::unordered_map<std::uint32_t, std::uint32_t> decodings;
};

void write_boxes(JsonWriter& json, std::string_view key, const std::vector<Box>& boxes,
                 const PlanNumbers& numbers);
// Under the key "merge".
void write_merge(JsonWriter& json, const Merge& merge, const PlanNumbers& numbers);

// They count sources and decodings as the JSON does; nothing is checked against a catalog.
[[nodiscard]] std::vector<Box> read_boxes(const JsonReader& reader, JsonReader::Element value,
                                          const JsonPlace& place);
[[nodiscard]] Merge read_merge(const JsonReader& reader, JsonReader::Element value,
                               const JsonPlace& place);
// At most 32 bits.
[[nodiscard]] std::uint32_t small_number(const JsonReader& reader, JsonReader::Element value,
                                         const JsonPlace& place);

}  // namespace loadstone
