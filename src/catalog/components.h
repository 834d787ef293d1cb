// Which tensors of a checkpoint are the components of a quantized tensor, told by names, dtypes and
// ranks alone. A plan needs to know it as well as what decodes, so it is decided here, below both.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"

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

  // Indices of all that give the data their meaning, as far as they are there.
  [[nodiscard]] std::vector<std::uint32_t> companions() const;
};

inline constexpr std::string_view bnb_state_infix = ".quant_state.bitsandbytes__";

[[nodiscard]] bool is_fp8(const TensorInfo& tensor) noexcept;

// In the catalog's order. FP8 data without scales are reported where the checkpoint claims to be
// quantized, see Catalog::claims_quantization(); elsewhere they are plain numbers.
[[nodiscard]] std::vector<Components> find_components(const Catalog& catalog);

// The components that a tensor is the data of.
class ComponentsByData {
 public:
  explicit ComponentsByData(const Catalog& catalog);

  [[nodiscard]] bool empty() const noexcept { return components_.empty(); }

  // Null: the tensor's values are plain numbers, or those of a scale.
  [[nodiscard]] const Components* find(std::uint32_t tensor) const noexcept;

  // Whether the tensor belongs to another one's codes: a scale, a state, a table of them, or a
  // scale of the activations that they are multiplied with.
  [[nodiscard]] bool is_companion(std::uint32_t tensor) const noexcept;

 private:
  void mark_beside(const Catalog& catalog, std::uint32_t tensor);

  std::vector<Components> components_;
  std::vector<std::uint32_t> by_data_;  // empty: there are none
  std::vector<bool> is_companion_;      // as long as by_data_
};

}  // namespace loadstone
