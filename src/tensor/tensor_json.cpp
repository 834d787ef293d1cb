#include "tensor/tensor_json.h"

#include "base/text.h"

namespace loadstone {

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Shape& shape) {
  std::vector<std::uint64_t> extents;
  reader.read(value, place, extents);
  shape = Shape(std::move(extents));
}

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Dtype& dtype) {
  const std::string_view text = reader.string(value, place);
  const auto known = parse_dtype_name(text);
  if (!known) reader.refuse(place, "the dtype is unknown", printable(text));
  dtype = *known;
}

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Encoding& encoding) {
  const std::string_view text = reader.string(value, place);
  const auto known = parse_encoding(text);
  if (!known) reader.refuse(place, "the encoding is unknown", printable(text));
  encoding = *known;
}

}  // namespace loadstone
