// The size of blocks with a scale each, for shapes alone do not determine it.
#pragma once

#include <string_view>

#include "codec/tensor_table.h"

namespace loadstone::scaled {

struct BlockCodec {
  std::string_view encoding;
  const char* even;    // the kernel for blocks that divide the matrix
  const char* by_128;  // the kernel for blocks of 128 by 128, the last of which may be cut
};

// Decodes codes, the first source, by a grid of scales, the second. Blocks have the size that the
// config claims. Without a claim they are 128 by 128, or divide the matrix into whole rows, whole
// columns or extents that are powers of two. Refuses other grids.
void decode_blocks(const TensorTable& table, QuantizedTensor& made, const BlockCodec& codec,
                   Decoding decoding);

}  // namespace loadstone::scaled
