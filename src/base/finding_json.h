// Findings in JSON documents.
#pragma once

#include <vector>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "loadstone/finding.h"

namespace loadstone {

// An array of objects with all fields, also the empty ones.
void write_findings(JsonWriter& json, const std::vector<Finding>& findings);
[[nodiscard]] std::vector<Finding> read_findings(const JsonReader& reader,
                                                 JsonReader::Element value, const JsonPlace& place);

}  // namespace loadstone
