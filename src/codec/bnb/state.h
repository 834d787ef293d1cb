// Reads and writes the JSON state in which bitsandbytes describes a packed weight.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/bnb.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"
#include "loadstone/tensor_info.h"

namespace loadstone {

// A state takes about 200 bytes. Tensors above this size are not parsed as a state.
inline constexpr std::uint64_t bnb_state_bytes_max = 4096;

struct BnbState {
  Shape shape;  // shape of the decoded tensor
  Dtype dtype = Dtype::bf16;
  std::uint64_t block_size = 64;
  std::optional<float> nested_offset;
};

// Throws Error "q.quant_state" or "q.group_size" that names the tensor `name`.
[[nodiscard]] BnbState parse_bnb_state(std::string_view text, const std::string& name);

// Returns the state of a weight of this type, as bitsandbytes writes it. Its scales are not nested.
[[nodiscard]] std::string bnb_state_text(std::string_view type, const BnbState& state);

// Check the tables "quant_map" and "nested_quant_map" by the rules of kernels/bnb_parts.h. Throw an
// Error that names the tensor.
void check_bnb_map(const TensorInfo& tensor, std::string_view bytes, Bnb4Code code);
void check_bnb_nested_map(const TensorInfo& tensor, std::string_view bytes);

}  // namespace loadstone
