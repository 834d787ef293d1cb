// The algorithms of quantization that configs name: their activations, and encodings of weights.
#pragma once

#include <string_view>

namespace loadstone {

inline constexpr std::string_view no_scheme = "none";

struct ActivationScheme {
  std::string_view algorithm;  // ModelOpt's name, or another method's, in lower case
  std::string_view numbers;    // "8-bit float, static", or no_scheme
  std::string_view extent{};   // values per scale: "token"
};

// Returns null for an unknown algorithm.
[[nodiscard]] const ActivationScheme* activation_scheme(std::string_view algorithm);

// Returns the beginning of the encodings' names; empty for an algorithm of several encodings, and
// for an unknown one. In any case of letters.
[[nodiscard]] std::string_view encoding_stem(std::string_view algorithm);

}  // namespace loadstone
