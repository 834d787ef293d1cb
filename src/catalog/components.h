// Which tensors of a checkpoint are the components of a quantized tensor, told by names, dtypes and
// ranks alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

// How the components are called, which says what decodes them.
enum class ComponentNaming : std::uint8_t {
  fp8,           // F8 data; scales "_scale_inv" or "_scale"
  int8,          // I8 data; scales "_scale"
  nibbles,       // U8 data of two numbers a byte; scales "_scale", "_scale_2"
  packed,        // U8 data "_packed"; scales "_scale", "_global_scale"
  mxfp4_blocks,  // U8 data "_blocks"; scales "_scales"
  bnb_4bit,      // U8 data; ".absmax", ".quant_state.bitsandbytes__nf4" ...
  bnb_int8,      // I8 data; scales "SCB" beside the weight
  foreign,       // data with companions that no codec here reads
};

struct Components {
  static constexpr std::uint32_t none = UINT32_MAX;

  std::string name;  // of the numbers: "model.layers.0.mlp.up_proj.weight"
  ComponentNaming naming = ComponentNaming::fp8;
  std::uint32_t data = none;   // index into Catalog::tensors(); none: it is missing
  std::uint32_t scale = none;  // also of one, where the naming has several kinds
  std::uint32_t scale_of_scales = none;
  // Of bitsandbytes: one, unless the file is broken. Of a foreign layout what makes it foreign.
  std::vector<std::uint32_t> states;
  // Names of components that are needed and missing; where several would do, all of them.
  std::vector<std::string> missing;
};

inline constexpr std::string_view bnb_state_infix = ".quant_state.bitsandbytes__";

[[nodiscard]] bool is_fp8(const TensorInfo& tensor) noexcept;

// In the catalog's order. FP8 data without scales are reported where the checkpoint claims to be
// quantized, see Catalog::quantization_claim(); elsewhere they are plain numbers.
[[nodiscard]] std::vector<Components> find_components(const Catalog& catalog);

// The same as a plan sees them: nothing is read, so there are no decodings and no findings.
[[nodiscard]] QuantizedTensors name_quantized_tensors(const Catalog& catalog);

// Of each tensor whether it belongs to codes: the companions of `components`, and tables and scales
// of activations, which are told by their own names. Empty where there are no components.
[[nodiscard]] std::vector<bool> mark_companions(const Catalog& catalog,
                                                const std::vector<Components>& components);

// Without a decoding.
[[nodiscard]] QuantizedTensor as_quantized_tensor(const Components& components);

}  // namespace loadstone
