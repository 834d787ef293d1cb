#include <algorithm>
#include <array>

#include "formats/gguf.h"

namespace loadstone {

namespace {

constexpr auto types = std::to_array<GgufType>({
    {0, "F32", Dtype::f32},
    {1, "F16", Dtype::f16},
    {2, "Q4_0", BlockFormat::q4_0},
    {3, "Q4_1", BlockFormat::q4_1},
    {4, "Q4_2", {}},
    {5, "Q4_3", {}},
    {6, "Q5_0", BlockFormat::q5_0},
    {7, "Q5_1", BlockFormat::q5_1},
    {8, "Q8_0", BlockFormat::q8_0},
    {9, "Q8_1", BlockFormat::q8_1},
    {10, "Q2_K", BlockFormat::q2_k},
    {11, "Q3_K", BlockFormat::q3_k},
    {12, "Q4_K", BlockFormat::q4_k},
    {13, "Q5_K", BlockFormat::q5_k},
    {14, "Q6_K", BlockFormat::q6_k},
    {15, "Q8_K", BlockFormat::q8_k},
    {16, "IQ2_XXS", BlockFormat::iq2_xxs},
    {17, "IQ2_XS", BlockFormat::iq2_xs},
    {18, "IQ3_XXS", BlockFormat::iq3_xxs},
    {19, "IQ1_S", BlockFormat::iq1_s},
    {20, "IQ4_NL", BlockFormat::iq4_nl},
    {21, "IQ3_S", BlockFormat::iq3_s},
    {22, "IQ2_S", BlockFormat::iq2_s},
    {23, "IQ4_XS", BlockFormat::iq4_xs},
    {24, "I8", Dtype::i8},
    {25, "I16", Dtype::i16},
    {26, "I32", Dtype::i32},
    {27, "I64", Dtype::i64},
    {28, "F64", Dtype::f64},
    {29, "IQ1_M", BlockFormat::iq1_m},
    {30, "BF16", Dtype::bf16},
    {31, "Q4_0_4_4", {}},
    {32, "Q4_0_4_8", {}},
    {33, "Q4_0_8_8", {}},
    {34, "TQ1_0", BlockFormat::tq1_0},
    {35, "TQ2_0", BlockFormat::tq2_0},
    {36, "IQ4_NL_4_4", {}},
    {37, "IQ4_NL_4_8", {}},
    {38, "IQ4_NL_8_8", {}},
    {39, "MXFP4", BlockFormat::mxfp4},
    {40, "NVFP4", BlockFormat::nvfp4},
    {41, "Q1_0", BlockFormat::q1_0},
    {42, "Q2_0", BlockFormat::q2_0},
});

}  // namespace

bool is_for_activations(Encoding encoding) noexcept {
  return encoding == Encoding(BlockFormat::q8_1) || encoding == Encoding(BlockFormat::q8_k);
}

std::optional<GgufType> gguf_type(std::uint32_t id) noexcept {
  // The ids have no gaps, so an id is also an index.
  if (id >= types.size()) return std::nullopt;
  return types[id];
}

std::optional<std::uint32_t> gguf_type_id(Encoding encoding) noexcept {
  if (is_for_activations(encoding)) return std::nullopt;
  const auto found = std::ranges::find(types, encoding, &GgufType::encoding);
  if (found == types.end()) return std::nullopt;
  return found->id;
}

}  // namespace loadstone
