// Values that are decoded: by a kernel from tensors of a checkpoint, or from bytes in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/export.h"
#include "loadstone/shape.h"

namespace loadstone {

// A tensor that a kernel makes of some sources, of which boxes copy like of any other: quantized
// weights and their scales, say. It is never there as a whole, only the chunks that are under way.
// Kernels are a set that grows, so they have names: docs/plan-json.md.
struct Decoding {
  std::string kernel;                  // "fp8_block", "fp4_block", "mxfp4", "nvfp4" ...
  std::vector<std::uint32_t> sources;  // index into Catalog::tensors(); the weights go first
  Shape shape;
  Dtype dtype = Dtype::f32;
  float offset = 0;              // added to nested scales (bitsandbytes); elsewhere 0
  std::uint64_t group_size = 0;  // numbers with one scale, where shapes do not say it (GPTQ)

  friend bool operator==(const Decoding&, const Decoding&) = default;
};

// Writes the values of bytes of one dtype or block format. Throws Error "usage" if `floats` has
// another count, "plan.dtype" and "gg.no_dequant" if the encoding has no values of its own.
LOADSTONE_API void decode(Encoding encoding, std::span<const std::byte> bytes,
                          std::span<float> floats);

}  // namespace loadstone
