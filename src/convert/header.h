// The text of the files that are written: headers and index of safetensors.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// What of the sources' metadata a header can hold: text, numbers and bools, as text; arrays, long
// texts and what is no UTF-8 are left out and told in `findings`. "format" is "pt" where nothing
// else is said: libraries ask for it.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> header_metadata(
    const Catalog& catalog, std::vector<Finding>& findings);

// Length, JSON and padding: all bytes before the data. Tensors must be in the order of their bytes.
[[nodiscard]] std::string header_text(const Conversion& conversion, const OutputFile& file);

// model.safetensors.index.json
[[nodiscard]] std::string index_text(const Conversion& conversion);

}  // namespace loadstone
