// Reads and writes shapes, dtypes and encodings as JSON.
#pragma once

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"

namespace loadstone {

inline void write_json(JsonWriter& json, const Shape& shape) { json.value(shape.extents()); }
inline void write_json(JsonWriter& json, Encoding encoding) { json.value(encoding.name()); }

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Shape& shape);
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Dtype& dtype);
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Encoding& encoding);

}  // namespace loadstone
