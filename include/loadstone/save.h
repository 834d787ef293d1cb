// Saves tensors from memory as a safetensors file.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include "loadstone/dtype.h"
#include "loadstone/export.h"
#include "loadstone/shape.h"

namespace loadstone {

class WritableStorage;

struct TensorBytes {
  std::string name{};
  Dtype dtype = Dtype::f32;
  Shape shape{};
  std::span<const std::byte> bytes{};  // owned by the caller
};

// Writes one file, with the tensors of the widest elements first, then by name. The file gets its
// name, and replaces an older file, when it is complete and on disk; a failure leaves nothing. Adds
// "format": "pt" if `metadata` has no "format". `storage` writes the file; null: this machine's
// file system. Throws Error "convert.name" for a name that the format does not allow,
// "st.duplicate" for a repeated name, "plan.dtype" for a dtype that the format lacks, "usage" if
// the size of `bytes` does not match dtype and shape, "st.header_too_large", "io.no_space",
// "io.denied", "io.write".
LOADSTONE_API void save_safetensors(const std::string& path, std::span<const TensorBytes> tensors,
                                    std::map<std::string, std::string> metadata = {},
                                    WritableStorage* storage = nullptr);

}  // namespace loadstone
