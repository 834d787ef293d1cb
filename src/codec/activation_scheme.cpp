#include "codec/activation_scheme.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/words.h"

namespace loadstone {

constexpr auto schemes = std::to_array<ActivationScheme>({
    {"fp8", "8-bit float, static", "tensor"},
    {"fp8_per_channel_per_token", "8-bit float, dynamic", "token"},
    {"fbgemm_fp8", "8-bit float, dynamic", "token"},
    {"mxfp8", "8-bit float, dynamic", "group of 32"},
    {"nvfp4", "4-bit float, local", "tensor_group of 16"},
    {"w4a8_awq", "8-bit float, static", "tensor"},
    {"fp8_pb_wo", no_scheme},
    {"mxfp4", no_scheme},
    {"int4", no_scheme},
    {"w8a16", no_scheme},
    {"w4a16", no_scheme},
    {"w4a16_awq", no_scheme},
    {"w4a16_nvfp4", no_scheme},
});

// Pairs of a part of an algorithm's name and the prefix of its encodings' names.
constexpr std::array<std::pair<std::string_view, std::string_view>, 5> stems = {
    {{"nvfp4", "nvfp4"}, {"mxfp4", "mxfp4"}, {"mxfp8", "mxfp8"}, {"awq", "int4"}, {"fp8", "fp8"}}};

const ActivationScheme* activation_scheme(std::string_view algorithm) {
  const auto found = std::ranges::find(schemes, algorithm, &ActivationScheme::algorithm);
  return found == schemes.end() ? nullptr : &*found;
}

std::string_view encoding_stem(std::string_view algorithm) {
  const std::string lower = lowered(algorithm);
  const auto known = std::ranges::find_if(
      stems, [&](const auto& each) { return lower.find(each.first) != std::string::npos; });
  return known == stems.end() ? std::string_view() : known->second;
}

}  // namespace loadstone
