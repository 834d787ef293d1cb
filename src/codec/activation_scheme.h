// The activations that algorithms of quantization quantize with the weights.
#pragma once

#include <string_view>

namespace loadstone {

inline constexpr std::string_view no_scheme = "none";

struct ActivationScheme {
  std::string_view algorithm;  // ModelOpt's name, or another method's, in lower case
  std::string_view numbers;    // "8-bit float, static", or no_scheme
  std::string_view extent{};   // the numbers that share a scale: "token"
};

// Returns null for an unknown algorithm.
[[nodiscard]] const ActivationScheme* activation_scheme(std::string_view algorithm);

}  // namespace loadstone
