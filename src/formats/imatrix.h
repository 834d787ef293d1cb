// Reads importance matrices that llama.cpp's llama-imatrix wrote, in GGUF or in the older format.
// Rules and error codes: docs/formats/imatrix.md.
#pragma once

#include "loadstone/importance.h"
#include "loadstone/storage.h"

namespace loadstone {

// Reads the whole file. Throws Error "im.*"; "gg.*" for a GGUF file that breaks a rule of GGUF.
[[nodiscard]] ImportanceMatrix read_imatrix(ByteSource& source);

}  // namespace loadstone
