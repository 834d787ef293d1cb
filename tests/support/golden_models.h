// Declares the checkpoints of the golden tests. Their values come from fixed seeds.
#pragma once

#include "support/files.h"

namespace loadstone::test {

// Writes folders with a config each ("moe", "gpt2", "adapter" ...), and single files
// ("llama.safetensors").
void write_golden_models(const TemporaryFolder& folder);

}  // namespace loadstone::test
