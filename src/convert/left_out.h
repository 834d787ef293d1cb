// Names the files of a model's folder that a conversion leaves out.
#pragma once

#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"

namespace loadstone {

// ModelOpt's file, which repeats the section of config.json.
inline constexpr std::string_view claim_name = "hf_quant_config.json";

// Returns true for the weights of an adapter in a folder of peft; of several models the first
// decides. Libraries take a folder with adapter_config.json for an adapter.
[[nodiscard]] bool is_adapter(const Catalog& catalog);
inline constexpr std::string_view adapter_stem = "adapter_model";
// Returns true for paths of such weights.
[[nodiscard]] bool is_adapter_file(std::string_view path);
inline constexpr std::string_view adapter_config_name = "adapter_config.json";

// Returns true for names of files that declare an encoding, besides config.json.
[[nodiscard]] bool is_claim(std::string_view name);

// Reads config.json and finds the files that declare an encoding, in the checkpoint's folder; those
// that a host denies, as it may deny missing files, are `denied` and declare nothing. Returns
// nothing for GGUF files, which need no config. Throws those of find_config(); without codes
// malformed files do not count.
[[nodiscard]] ModelFolder claims_beside(const Catalog& catalog);

// Returns the file that claims an encoding; empty if none does.
[[nodiscard]] std::string_view claiming_file(const ModelFolder& folder);
// The error for a claim that no tensor bears out. `root`: the model's folder, or empty.
[[nodiscard]] Finding unread_claim(std::string_view file, std::string_view root = {});

// Adds a finding for each kind of file that does not come along. Adapters that the catalog has are
// merged. `denied`: names of files that the host denies.
void tell_left(const ModelFolder& folder, const std::vector<std::string>& denied,
               const Catalog& catalog, std::vector<Finding>& findings);

// Drops the files that declare the source's encoding: the output has a different one.
void drop_claims(std::vector<ExtraFile>& files, std::vector<Finding>& findings);

}  // namespace loadstone
