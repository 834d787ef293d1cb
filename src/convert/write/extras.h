// Small files next to the model's: checked first, then written in pieces; and files of its folder
// that a conversion omits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Visits "a" and "a/b" for "a/b/c".
template <typename Visit>
void for_each_folder(const std::string& name, const Visit& visit) {
  for (std::size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
    visit(name.substr(0, at));
  }
}

// The largest tokenizers have some hundred megabytes; a larger file contains weights.
inline constexpr std::uint64_t extra_bytes_max = 1u << 30;

// Throws Error "convert.extra" for an invalid or repeated name, a link, anything else that is not a
// regular file, and a file too large for a companion.
void check_extras(const Conversion& conversion, WritableStorage& storage);

// Returns the bytes of all of them.
[[nodiscard]] std::uint64_t extra_bytes(const Conversion& conversion, WritableStorage& storage);

[[nodiscard]] bool is_extra_name(const Conversion& conversion, const std::string& name) noexcept;

// Returns true if extras are in or below this folder.
[[nodiscard]] bool has_folder(const Conversion& conversion, const std::string& name) noexcept;
// Returns true if the folder `name` in `path` contains only extras.
[[nodiscard]] bool is_extra_folder(const Conversion& conversion, WritableStorage& storage,
                                   const std::string& path, const std::string& name);

// Adds the content of the files next to the model to the digest.
void add_extras(const Conversion& conversion, WritableStorage& storage, Digest& digest);

// Returns true if both files have the same bytes; reads them only if their sizes agree.
[[nodiscard]] bool have_same_bytes(const ExtraFile& a, const ExtraFile& b,
                                   WritableStorage& storage);

// Returns the content.
[[nodiscard]] std::string text_of(const ExtraFile& extra, WritableStorage& storage);

// Writes a new file `path`, flushed to disk. Returns its size. Throws Error "io.changed" if the
// copied file changes meanwhile.
std::uint64_t write_extra(WritableStorage& storage, const ExtraFile& extra,
                          const std::string& path);

// ModelOpt's file, which repeats the section of config.json.
inline constexpr std::string_view claim_name = "hf_quant_config.json";

// Returns true for the weights of an adapter in a folder of PEFT; of several models the first
// counts. Libraries treat a folder with adapter_config.json as an adapter.
[[nodiscard]] bool is_adapter(const Catalog& catalog);
inline constexpr std::string_view adapter_stem = "adapter_model";
// Returns true for paths of such weights.
[[nodiscard]] bool is_adapter_file(std::string_view path);
inline constexpr std::string_view adapter_config_name = "adapter_config.json";

// Returns true for names of files that declare an encoding, besides config.json.
[[nodiscard]] bool is_claim(std::string_view name);

// Reads config.json and finds the files in the checkpoint's folder that declare an encoding; those
// that a host denies, as some hosts deny missing files, are in `denied` and declare nothing. Empty
// for GGUF files, which need no config. Throws the errors of find_config(); without codes malformed
// files are ignored.
[[nodiscard]] ModelFolder claims_beside(const Catalog& catalog);

// Returns the file that claims an encoding, or an empty text.
[[nodiscard]] std::string_view claiming_file(const ModelFolder& folder);
// Returns the error for a claim that no tensor confirms. `root`: the model's folder, or empty.
[[nodiscard]] Finding unread_claim(std::string_view file, std::string_view root = {});

// Adds a finding for each kind of file that is not copied. Adapters in the catalog are merged.
// `denied`: names of files that the host denies.
void tell_left(const ModelFolder& folder, const std::vector<std::string>& denied,
               const Catalog& catalog, std::vector<Finding>& findings);

// Drops the files that declare the source's encoding, which the output does not have.
void drop_claims(std::vector<ExtraFile>& files, std::vector<Finding>& findings);

}  // namespace loadstone
