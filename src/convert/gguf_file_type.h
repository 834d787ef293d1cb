// general.file_type of a GGUF file whose encodings are not those of its source.
#pragma once

#include "loadstone/convert.h"

namespace loadstone {

// Corrects a file type that came from the source and is not true of the output's tensors; removes
// it where no file type is. One that the caller gave, or a mix has set, stays.
void settle_file_type(const ConvertOptions& options, Conversion& conversion);

// Warns of vectors of a language model that get a dtype in which llama.cpp does not compute them.
void tell_narrow_vectors(const ConvertOptions& options, Conversion& conversion);

}  // namespace loadstone
