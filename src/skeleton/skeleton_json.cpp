// A skeleton as JSON: docs/skeleton-json.md.
#include <string>

#include "base/json_fields.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/skeleton.h"

namespace loadstone {

namespace {

constexpr std::size_t text_bytes_max = 256u << 20;

std::vector<std::uint64_t> read_numbers(const JsonReader& reader, JsonReader::Element value,
                                        const JsonPlace& place) {
  std::vector<std::uint64_t> numbers;
  for (const auto number : reader.array(value, place)) {
    numbers.push_back(reader.unsigned_number(number, {&place, {}, numbers.size()}));
  }
  return numbers;
}

Shape read_shape(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  return Shape(read_numbers(reader, value, place));
}

Slice read_slice(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  Slice slice;
  slice.begin = read_numbers(reader, fields.required("begin"), fields.at("begin"));
  slice.shape = read_shape(reader, fields.required("shape"), fields.at("shape"));
  if (const auto groups = fields.optional("groups")) {
    slice.groups = read_numbers(reader, *groups, fields.at("groups"));
  }
  fields.done();
  return slice;
}

Target read_target(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  Target target;
  target.name = reader.string(fields.required("name"), fields.at("name"));
  target.shape = read_shape(reader, fields.required("shape"), fields.at("shape"));
  const auto dtype_name = reader.string(fields.required("dtype"), fields.at("dtype"));
  auto dtype = dtype_from_name(dtype_name);
  if (!dtype) dtype = dtype_from_user(dtype_name);
  if (!dtype) {
    reader.refuse(fields.at("dtype"), "unknown dtype", printable(dtype_name), "F32, BF16, I64 ...");
  }
  target.dtype = *dtype;
  if (const auto kind = fields.optional("kind")) {
    target.kind = reader.named<TargetKind>(*kind, fields.at("kind"));
  }
  if (const auto tie_of = fields.optional("tie_of")) {
    target.tie_of = reader.string(*tie_of, fields.at("tie_of"));
    if (target.tie_of.empty()) reader.refuse(fields.at("tie_of"), "an empty name; write null");
  }
  if (const auto slice = fields.optional("slice")) {
    target.slice = read_slice(reader, *slice, fields.at("slice"));
  }
  fields.done();
  return target;
}

}  // namespace

Skeleton Skeleton::from_json(std::string_view text) {
  return only_errors([&] {
    const JsonDocument document(text, "skeleton.json", text_bytes_max);
    const JsonReader reader("skeleton.json");
    const JsonPlace top;
    JsonObject fields(reader, document.root(), top);
    const JsonPlace place = fields.at("targets");
    Skeleton skeleton;
    skeleton.values_known = false;
    for (const auto item : reader.array(fields.required("targets"), place)) {
      skeleton.targets.push_back(read_target(reader, item, {&place, {}, skeleton.targets.size()}));
    }
    fields.done();
    skeleton.validate();
    return skeleton;
  });
}

}  // namespace loadstone
