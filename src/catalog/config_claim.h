// The word of the configs beside a checkpoint on how it is quantized.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "catalog/open_file.h"
#include "loadstone/catalog.h"

namespace loadstone {

// The members of a config that say it: at the top, or below where a model has several parts.
inline constexpr std::array<std::string_view, 3> quantization_members = {
    "quantization_config", "compression_config", "quantization"};

// The section as a separate file, written by AutoGPTQ, GPTQModel and AutoAWQ.
struct OwnConfig {
  std::string_view name;
  std::string_view method;  // other programs have files of these names too
};
inline constexpr std::array<OwnConfig, 2> own_configs = {
    {{"quantize_config.json", "gptq"}, {"quant_config.json", "awq"}}};

// How many objects and lists around such a member are looked into.
inline constexpr unsigned config_depth_max = 32;

// Throws Error "q.config" for a config that contradicts itself, and those of check_config().
[[nodiscard]] QuantizationClaim quantization_claim(std::string_view config,
                                                   const std::string& path = "config.json");

// Reads config.json and hf_quant_config.json in the folder, and completes them from
// quantize_config.json (GPTQ) and quant_config.json (AWQ). Throws Error "q.config" if two of them
// contradict each other.
[[nodiscard]] QuantizationClaim quantization_claim(const FileOpener& opener,
                                                   const std::string& folder);

}  // namespace loadstone
