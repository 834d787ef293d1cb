// Decoded values, which a kernel computes from tensors of a checkpoint or from bytes in memory.
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

// A virtual tensor that a kernel computes from its source tensors, such as quantized weights and
// their scales. Boxes copy from it like from any tensor, and it exists only window by window. New
// kernels may be added, so a string identifies the kernel: docs/plan-json.md.
struct Decoding {
  std::string kernel{};                  // "fp8_block", "fp4_block", "mxfp4", "nvfp4" ...
  std::vector<std::uint32_t> sources{};  // indices into Catalog::tensors(), the weights first
  Shape shape{};
  Dtype dtype = Dtype::f32;
  float offset = 0;              // added to nested scales (bitsandbytes); 0 for other kernels
  std::uint64_t group_size = 0;  // values per scale, if shapes do not determine it (GPTQ)

  friend bool operator==(const Decoding&, const Decoding&) = default;
};

// Decodes bytes of one dtype or block format. Throws Error "usage" if `floats` has the wrong size,
// and "plan.dtype" or "gg.no_dequant" if the encoding cannot be decoded without other tensors.
LOADSTONE_API void decode(Encoding encoding, std::span<const std::byte> bytes,
                          std::span<float> floats);

}  // namespace loadstone
