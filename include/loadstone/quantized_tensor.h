// A quantized tensor and its component tensors, and what the configs beside a checkpoint claim.
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

// The word of the configs beside a checkpoint on how it is quantized.
struct QuantizationClaim {
  bool is_made = false;
  // Rows and columns of an FP8 block that shares a scale. Zeros: the configs give several sizes.
  std::optional<std::array<std::uint64_t, 2>> block = {};
  bool has_whole_scales = false;  // the configs say of FP8 that there are no blocks
  // The words of GPTQ's, AWQ's and compressed-tensors' configs (no closed set), whose tensors do
  // not describe themselves; what is not said, or not the same in all groups of a config, is left
  // out.
  std::string method = {};                           // "gptq", "awq", "compressed-tensors" ...
  std::string layout = {};                           // "gptq_v2", "gemm" ...
  std::optional<std::uint64_t> bits = std::nullopt;  // of a code
  std::optional<std::uint64_t> group_size =
      std::nullopt;  // numbers with one scale; may be more than there are
  std::optional<bool> is_symmetric = std::nullopt;  // there are no zero points
  std::optional<bool> is_reordered = std::nullopt;  // groups are in an order of their own
  bool has_exceptions = false;                      // some modules are described otherwise
  // Transforms of activations while the model runs: "R4_input". Empty: weights are the model's.
  std::vector<std::string> transforms = {};
  // XXH3-128 of the configs' sections, 32 hex digits; empty: the configs were not read.
  std::string digest = {};
  bool follows_links = false;  // the configs were read with OpenOptions::allow_links
};

// One quantized tensor. Numbers of tensors are indices into Catalog::tensors().
struct LOADSTONE_API QuantizedTensor {
  static constexpr std::uint32_t none = UINT32_MAX;

  std::string name;                   // of the numbers: "model.layers.0.mlp.up_proj.weight"
  std::string encoding;               // one of quantized_encodings(); empty: unknown
  std::uint32_t data = none;          // the codes; none: they are missing
  std::vector<std::uint32_t> scales;  // scales, then scales of scales
  std::vector<std::uint32_t> states;  // bitsandbytes' descriptions; whatever makes a layout unknown
  Decoding decoding;                  // gives the numbers; without a kernel where nothing does
  // Tables, states and scales of activations: needed no more once the numbers are decoded.
  std::vector<std::uint32_t> unneeded;
  // Tensors whose values were read to recognise it: states, tables, orders, markers.
  std::vector<std::uint32_t> decided_by;
  // The model has the last two dims in the other order: GPT-OSS multiplies from the right.
  bool is_transposed = false;
  bool has_zero_points = false;  // the second of `scales`
  Finding defect;                // where nothing gives the numbers: the reason, an error

  [[nodiscard]] bool is_readable() const noexcept { return !decoding.kernel.empty(); }
  // Of the model's tensor; only where is_readable().
  [[nodiscard]] Shape shape() const;
  // The name of a component's role: "data", "scale", "scale_2", "absmax", "state" ...
  [[nodiscard]] std::string role(std::uint32_t tensor, std::string_view tensor_name) const;
  // Scales and states: all that gives the codes their meaning.
  [[nodiscard]] std::vector<std::uint32_t> companions() const;
};

}  // namespace loadstone
