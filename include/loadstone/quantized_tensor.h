// A quantized tensor with its components, and the quantization that a checkpoint's configs declare.
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
  bool is_made = false;  // the configs declare a quantization
  // Rows and columns of an FP8 block that shares a scale. Zeros: the configs give several sizes.
  std::optional<std::array<std::uint64_t, 2>> block = {};
  bool has_whole_scales = false;  // FP8 tensors have scales without blocks
  // Fields of the configs of GPTQ, AWQ and compressed-tensors (others may follow), whose tensors do
  // not describe themselves. A field is empty if it is absent or differs between groups.
  std::string method = {};                           // "gptq", "awq", "compressed-tensors" ...
  std::string layout = {};                           // "gptq_v2", "gemm" ...
  std::optional<std::uint64_t> bits = std::nullopt;  // per code
  std::optional<std::uint64_t> group_size =
      std::nullopt;  // values per scale; may exceed the number of values
  std::optional<bool> is_symmetric = std::nullopt;  // the tensors have no zero points
  std::optional<bool> is_reordered = std::nullopt;  // groups are not in the order of columns
  bool has_exceptions = false;                      // some modules are declared differently
  // Modules for which a config of MLX declares other bits or another group size.
  struct Module {
    std::string name;
    std::optional<std::uint64_t> bits;
    std::optional<std::uint64_t> group_size;
  };
  std::vector<Module> modules = {};
  // Transforms that the running model applies to activations: "R4_input". Empty: it applies none.
  std::vector<std::string> transforms = {};
  // XXH3-128 of the configs' sections on quantization, 32 hex digits; empty: the configs were not
  // read.
  std::string digest = {};
  bool follows_links = false;  // the configs were read with OpenOptions::allow_links
};

// One quantized tensor. Its components are indices into Catalog::tensors().
struct LOADSTONE_API QuantizedTensor {
  static constexpr std::uint32_t none = UINT32_MAX;

  std::string name;                   // of the decoded tensor: "model.layers.0.mlp.up_proj.weight"
  std::string encoding;               // name of a quantized_encodings() element; empty: unknown
  std::uint32_t data = none;          // the codes; `none`: the checkpoint lacks them
  std::vector<std::uint32_t> scales;  // scales, then scales of scales
  // States of bitsandbytes, and tensors whose presence makes the layout unknown.
  std::vector<std::uint32_t> states;
  Decoding decoding;  // has no kernel if the tensor cannot be decoded
  // Tables, states and scales of activations that decoding does not need.
  std::vector<std::uint32_t> unneeded;
  // Tensors whose values loadstone read to recognise this one: states, tables, orders, markers.
  std::vector<std::uint32_t> decided_by;
  // The checkpoint has the last two dims swapped compared to the model, as in GPT-OSS, which
  // multiplies by the weight from the right.
  bool is_transposed = false;
  bool has_zero_points = false;  // the second element of `scales` is the zero points
  Finding defect;                // if the tensor cannot be decoded: an error with the reason

  [[nodiscard]] bool is_readable() const noexcept { return !decoding.kernel.empty(); }
  // Returns the shape of the decoded tensor. Precondition: is_readable().
  [[nodiscard]] Shape shape() const;
  // Returns the role of a component: "data", "scale", "scale_2", "absmax", "state" ...
  [[nodiscard]] std::string role(std::uint32_t tensor, std::string_view tensor_name) const;
  // Returns scales and states, which are needed to interpret the codes.
  [[nodiscard]] std::vector<std::uint32_t> companions() const;
};

}  // namespace loadstone
