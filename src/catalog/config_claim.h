// The quantization that a checkpoint's configs declare.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/open_file.h"
#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

// Members of a config that declare it: at the top, or in the configs of a model's parts.
inline constexpr std::array<std::string_view, 3> quantization_members = {
    "quantization_config", "compression_config", "quantization"};

// The section as a separate file, written by AutoGPTQ, GPTQModel and AutoAWQ.
struct OwnConfig {
  std::string_view name;
  std::string_view method;  // other programs use these file names too
};
inline constexpr std::array<OwnConfig, 2> own_configs = {
    {{"quantize_config.json", "gptq"}, {"quant_config.json", "awq"}}};

// The files that quantization_claim() reads in a folder.
inline constexpr std::array<std::string_view, 4> claiming_files = {
    "config.json", "hf_quant_config.json", own_configs[0].name, own_configs[1].name};

// Maximal depth of objects and lists around such a member.
inline constexpr unsigned config_depth_max = 32;

// Throws Error "q.config" for a config that contradicts itself, and those of check_config().
[[nodiscard]] QuantizationClaim quantization_claim(std::string_view config,
                                                   const std::string& path = "config.json");

// Reads config.json and hf_quant_config.json in the folder, and completes them from
// quantize_config.json (GPTQ) and quant_config.json (AWQ). Throws Error "q.config" if two of them
// name different formats, and adds a warning "q.config" to `findings` if they differ otherwise.
[[nodiscard]] QuantizationClaim quantization_claim(const FileOpener& opener,
                                                   const std::string& folder,
                                                   std::vector<Finding>* findings = nullptr);

// Throws Error "io.changed" unless the digest of the folder's claim is the expected one.
void require_claim(const FileOpener& opener, const std::string& folder, std::string_view expected);

inline constexpr std::string_view method_of_diffusers = "diffusers' bitsandbytes";

// A list of modules, by which libraries choose those that they read as codes.
struct ConfigList {
  std::string file;
  // The section's; of hf_quant_config.json "modelopt". diffusers reads lists of bitsandbytes
  // differently than transformers: method_of_diffusers.
  std::string method;
  std::string key;  // "ignore", "targets" (of all groups) ...
  std::vector<std::string> entries;
};

// Fields of the configs that affect no value; empty if groups differ. See contradictions().
struct ConfigWords {
  std::string file = {};                                   // the first with a claim
  bool has_groups = false;                                 // compressed-tensors' groups
  std::string code_type = {};                              // "int" or "float"
  std::string strategy = {};                               // values per scale
  std::string sparsity = {};                               // the format of sparsity_config
  std::string algorithm = {};                              // ModelOpt's
  std::optional<std::uint64_t> group_size = std::nullopt;  // the algorithm's
  std::string algorithm_file = {};
  std::vector<ConfigList> lists = {};  // of files with one section
};

// Reads config.json and hf_quant_config.json, and adds a warning "q.config" if they name different
// algorithms or group sizes.
[[nodiscard]] ConfigWords config_words(const FileOpener& opener, const std::string& folder,
                                       std::vector<Finding>& findings);

}  // namespace loadstone
