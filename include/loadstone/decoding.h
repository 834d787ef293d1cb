// Numbers that a kernel computes from one or several tensors of a checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loadstone/dtype.h"
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

}  // namespace loadstone
