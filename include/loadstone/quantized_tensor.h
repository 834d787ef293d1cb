// A quantized tensor and its components, and the claims of a checkpoint's configs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/decoding.h"
#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/shape.h"

namespace loadstone {

// The quantization that a checkpoint's configs declare.
struct QuantizationClaim {
  bool is_made = false;
  // Rows and columns of an FP8 block that shares a scale. Zeros: the configs give several sizes.
  std::optional<std::array<std::uint64_t, 2>> block = {};
  bool has_whole_scales = false;  // FP8 without blocks
  // Fields of GPTQ's, AWQ's and compressed-tensors' configs (an open set), whose tensors do not
  // describe themselves. Fields that are absent, or differ between groups of a config, are empty.
  std::string method = {};                           // "gptq", "awq", "compressed-tensors" ...
  std::string layout = {};                           // "gptq_v2", "gemm" ...
  std::optional<std::uint64_t> bits = std::nullopt;  // of a code
  std::optional<std::uint64_t> group_size =
      std::nullopt;  // values per scale; may exceed the number of values
  std::optional<bool> is_symmetric = std::nullopt;  // no zero points
  std::optional<bool> is_reordered = std::nullopt;  // groups are not in the order of columns
  bool has_exceptions = false;                      // some modules have a different description
  // Transforms of activations while the model runs: "R4_input". Empty: weights need none.
  std::vector<std::string> transforms = {};
  // XXH3-128 of the configs' sections, 32 hex digits; empty: the configs were not read.
  std::string digest = {};
  bool follows_links = false;  // the configs were read with OpenOptions::allow_links
};

// One quantized tensor. Tensors are indices into Catalog::tensors().
struct LOADSTONE_API QuantizedTensor {
  static constexpr std::uint32_t none = UINT32_MAX;

  std::string name;                   // of the decoded tensor: "model.layers.0.mlp.up_proj.weight"
  std::string encoding;               // one of quantized_encodings(); empty: unknown
  std::uint32_t data = none;          // the codes; `none`: missing
  std::vector<std::uint32_t> scales;  // scales, then scales of scales
  std::vector<std::uint32_t> states;  // bitsandbytes' states; anything that makes a layout unknown
  Decoding decoding;                  // has no kernel if the tensor cannot be decoded
  // Tables, states and scales of activations, which decoded values make unnecessary.
  std::vector<std::uint32_t> unneeded;
  // Tensors whose values were read to recognise this one: states, tables, orders, markers.
  std::vector<std::uint32_t> decided_by;
  // The model has the last two dims swapped: GPT-OSS multiplies from the right.
  bool is_transposed = false;
  bool has_zero_points = false;  // the second of `scales`
  Finding defect;                // an error with the reason, if it cannot be decoded

  [[nodiscard]] bool is_readable() const noexcept { return !decoding.kernel.empty(); }
  // Shape and dtype of the model's tensor. Precondition: is_readable().
  [[nodiscard]] Shape shape() const;
  // Returns the role of a component: "data", "scale", "scale_2", "absmax", "state" ...
  [[nodiscard]] std::string role(std::uint32_t tensor, std::string_view tensor_name) const;
  // Scales and states: the tensors needed to interpret the codes.
  [[nodiscard]] std::vector<std::uint32_t> companions() const;
};

}  // namespace loadstone
