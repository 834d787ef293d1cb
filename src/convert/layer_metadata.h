// The header's metadata that names the encoding of each layer.
#pragma once

#include "loadstone/convert.h"

namespace loadstone {

// Leaves in the output's metadata the layers whose codes the plan moves as they are, under the
// names that they get; `drops_all`: no codes stay. Values that the caller gave are not changed.
void keep_layer_metadata(Conversion& conversion, const ConvertOptions& options, bool drops_all);

}  // namespace loadstone
