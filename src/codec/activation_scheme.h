// Describes the quantization algorithms that configs name: their activations and encodings.
#pragma once

#include <string_view>

namespace loadstone {

inline constexpr std::string_view no_scheme = "none";

struct ActivationScheme {
  std::string_view algorithm;  // ModelOpt's or another method's name, in lower case
  std::string_view numbers;    // format of activations: "8-bit float, static", or no_scheme
  std::string_view extent{};   // the values that share a scale, such as "token"
};

// Returns null for an unknown algorithm.
[[nodiscard]] const ActivationScheme* activation_scheme(std::string_view algorithm);

// Returns the prefix of the names of the algorithm's encodings. Returns an empty string if the
// algorithm is unknown or has several encodings. Ignores the case of letters.
[[nodiscard]] std::string_view encoding_stem(std::string_view algorithm);

}  // namespace loadstone
