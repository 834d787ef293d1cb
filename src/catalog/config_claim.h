// Reads the quantization that a checkpoint's configs declare.
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

// Members of a config that declare a quantization, at the top level or in the configs of a model's
// parts.
inline constexpr std::array<std::string_view, 3> quantization_members = {
    "quantization_config", "compression_config", "quantization"};

// Members next to a declared quantization that describe the codes of some modules, such as the
// experts of DeepSeek-V4.
inline constexpr std::array<std::string_view, 1> quantization_details = {"expert_dtype"};

// A file that contains only the quantization section, as AutoGPTQ, GPTQModel and AutoAWQ write it.
struct OwnConfig {
  std::string_view name;
  std::string_view method;  // required, because other programs use these file names too
};
inline constexpr std::array<OwnConfig, 2> own_configs = {
    {{"quantize_config.json", "gptq"}, {"quant_config.json", "awq"}}};

// The files that quantization_claim() reads in a folder.
inline constexpr std::array<std::string_view, 4> claiming_files = {
    "config.json", "hf_quant_config.json", own_configs[0].name, own_configs[1].name};

// Maximum depth of objects and lists around one of quantization_members.
inline constexpr unsigned config_depth_max = 32;

// Throws Error "q.config" if a config contradicts itself, and the errors of check_config().
[[nodiscard]] QuantizationClaim quantization_claim(std::string_view config,
                                                   const std::string& path = "config.json");

// Reads config.json and hf_quant_config.json in the folder, and completes them from
// quantize_config.json (GPTQ) and quant_config.json (AWQ). Throws Error "q.config" if two of the
// files name different formats, and adds a warning "q.config" to `findings` if the files differ
// otherwise.
[[nodiscard]] QuantizationClaim quantization_claim(const FileOpener& opener,
                                                   const std::string& folder,
                                                   std::vector<Finding>* findings = nullptr);

// Throws Error "io.changed" unless the digest of the folder's claim is the expected one.
void require_claim(const FileOpener& opener, const std::string& folder, std::string_view expected);

inline constexpr std::string_view method_of_diffusers = "diffusers' bitsandbytes";

// A list in a config, by which libraries choose the modules that they read as codes.
struct ConfigList {
  std::string file;
  // Method of the section, or "modelopt" for hf_quant_config.json. Lists of bitsandbytes have
  // method_of_diffusers in configs of diffusers, which reads them differently than transformers.
  std::string method;
  std::string key;  // such as "ignore", or "targets" (of all groups)
  std::vector<std::string> entries;
};

// Fields of the configs that do not affect decoding, for contradictions(). A field is empty if it
// differs between groups.
struct ConfigWords {
  std::string file = {};                                   // the first config with a section
  bool has_groups = false;                                 // groups of compressed-tensors
  std::string code_type = {};                              // "int" or "float"
  std::string strategy = {};                               // such as "channel" or "group"
  std::string sparsity = {};                               // the format of sparsity_config
  std::string algorithm = {};                              // quant_algo of ModelOpt
  std::optional<std::uint64_t> group_size = std::nullopt;  // group size of ModelOpt
  std::string algorithm_file = {};
  std::vector<ConfigList> lists = {};  // only from files with a single section
};

// Reads config.json and hf_quant_config.json, and adds a warning "q.config" if they name different
// algorithms or group sizes.
[[nodiscard]] ConfigWords config_words(const FileOpener& opener, const std::string& folder,
                                       std::vector<Finding>& findings);

}  // namespace loadstone
