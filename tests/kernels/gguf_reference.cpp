#include "kernels/gguf_reference.h"

namespace loadstone::reference {

std::vector<std::size_t> half_places(BlockFormat format) {
  switch (format) {
    case BlockFormat::iq1_m:  // in four parts
    case BlockFormat::mxfp4:
    case BlockFormat::nvfp4:
      return {};
    case BlockFormat::q4_1:
    case BlockFormat::q5_1:
    case BlockFormat::q4_k:
    case BlockFormat::q5_k:
      return {0, 2};
    case BlockFormat::q2_k:
      return {80, 82};
    case BlockFormat::q3_k:
      return {108};
    case BlockFormat::q6_k:
      return {208};
    case BlockFormat::tq1_0:
      return {52};
    case BlockFormat::tq2_0:
      return {64};
    default:
      return {0};
  }
}

}  // namespace loadstone::reference
