// Tensors in memory, written as a file of safetensors.
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
  std::string name;
  Dtype dtype = Dtype::f32;
  Shape shape;
  std::span<const std::byte> bytes;  // the caller's
};

// Writes all of them to one file, the widest elements first, then by name. The file has its name
// when it is whole and on the disk, and replaces an older one; a failure leaves nothing. `metadata`
// gets "format": "pt" if it has no format. `storage`: null: this machine's files. Throws Error
// "convert.name" for a name that the format cannot hold, "st.duplicate" for one that is given
// twice, "plan.dtype" for a dtype that it lacks, "usage" for bytes that are not those of dtype and
// shape, "st.header_too_large", "io.no_space", "io.denied", "io.write".
LOADSTONE_API void save_safetensors(const std::string& path, std::span<const TensorBytes> tensors,
                                    std::map<std::string, std::string> metadata = {},
                                    WritableStorage* storage = nullptr);

}  // namespace loadstone
