#include "plan/merge_json.h"

#include <algorithm>
#include <memory>
#include <string>

#include "base/base64.h"
#include "boxes/merges.h"
#include "boxes/sources.h"
#include "loadstone/error.h"

namespace loadstone {

PlanNumbers number_boxes(const ValueSet& values) {
  constexpr std::uint32_t unnumbered = UINT32_MAX;
  PlanNumbers numbers;
  numbers.sources.assign(values.tensors().size(), unnumbered);
  numbers.decodings.assign(values.decodings.size(), unnumbered);
  const auto add = [&](auto& known, auto& used, std::uint32_t index, const char* message,
                       std::string_view target) {
    if (index >= known.size()) {
      throw Error("plan.recipe", message, {.tensor = std::string(target)});
    }
    if (known[index] != unnumbered) return;
    known[index] = static_cast<std::uint32_t>(used.size());
    used.push_back(index);
  };
  for (const Value& value : values.list) {
    const auto add_source = [&](std::uint32_t source) {
      add(numbers.sources, numbers.sources_used, source,
          "the recipes were made for a different catalog", value.name);
    };
    std::ranges::for_each(sources_of(value.boxes, values.decodings, value.merge), add_source);
    std::ranges::for_each(value.decided_by, add_source);
    for_each_box(value, [&](const Box& box) {
      if (box.decoding == no_decoding) return;
      add(numbers.decodings, numbers.decodings_used, box.decoding,
          "a box refers to a decoding that does not exist", value.name);
    });
  }
  return numbers;
}

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               JsonIndex<std::uint32_t> each) {
  const std::uint64_t index = reader.unsigned_number(value, place);
  if (index >= no_decoding) reader.refuse(place, "no entry has this number", std::to_string(index));
  each.index = static_cast<std::uint32_t>(index);
}

void write_json(JsonWriter& json, JsonIndices<const std::vector<std::uint32_t>> each) {
  json.begin_array();
  for (const std::uint32_t index : each.list) json.value(each.numbers.at(index));
  json.end_array();
}

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               JsonIndices<std::vector<std::uint32_t>> each) {
  for (const auto item : reader.array(value, place)) {
    each.list.push_back(reader.small_number(item, place, "no source has this number"));
  }
}

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               BoxDim& dim) {
  const auto parts = reader.array(value, place);
  if (parts.size() != 3) {
    reader.refuse(place, "a dimension must have three numbers", std::to_string(parts.size()),
                  "[extent, source_stride, target_stride]");
  }
  auto part = parts.begin();
  dim.extent = reader.unsigned_number(*part, place);
  dim.source_stride = reader.unsigned_number(*++part, place);
  dim.target_stride = reader.unsigned_number(*++part, place);
}

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Origin& origin) {
  // Plans saved by loadstone 0.1.0 use the old word.
  const bool is_old_word = reader.string(value, place) == "exception";
  origin = is_old_word ? Origin::excluded : reader.named<Origin>(value, place);
}

void write_json(JsonWriter& json, const Constant& constant) { json.value(base64_from(*constant)); }

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Constant& constant) {
  auto bytes = bytes_from_base64(reader.string(value, place));
  if (!bytes) reader.refuse(place, "the text is not base64");
  constant = std::make_shared<const std::vector<std::byte>>(*std::move(bytes));
}

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               DeviceMapEntry& entry) {
  const auto parts = reader.array(value, place);
  if (parts.size() != 2) reader.refuse(place, "an entry must be a module and a device");
  entry = {std::string(reader.string(parts.at(0).value_unsafe(), place)),
           std::string(reader.string(parts.at(1).value_unsafe(), place))};
}

}  // namespace loadstone
