// Checks and writes the small files next to a model, and finds files of the model's folder that a
// conversion omits.
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

// Calls `visit` with each folder of a path: "a" and "a/b" for "a/b/c".
template <typename Visit>
void for_each_folder(const std::string& name, const Visit& visit) {
  for (std::size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
    visit(name.substr(0, at));
  }
}

// The largest tokenizers take a few hundred megabytes; a larger file contains weights.
inline constexpr std::uint64_t extra_bytes_max = 1u << 30;

// Throws Error "convert.extra" for a companion file with an invalid or repeated name, for a link or
// anything else that is not a regular file, and for a file that is too large.
void check_extras(const Conversion& conversion, WritableStorage& storage);

// Returns the number of bytes of all companion files.
[[nodiscard]] std::uint64_t extra_bytes(const Conversion& conversion, WritableStorage& storage);

[[nodiscard]] bool is_extra_name(const Conversion& conversion, const std::string& name) noexcept;

// Returns true if companion files are in or below this folder.
[[nodiscard]] bool has_folder(const Conversion& conversion, const std::string& name) noexcept;
// Returns true if the folder `name` in `path` contains only companion files.
[[nodiscard]] bool is_extra_folder(const Conversion& conversion, WritableStorage& storage,
                                   const std::string& path, const std::string& name);

// Adds the content of the companion files to the digest.
void add_extras(const Conversion& conversion, WritableStorage& storage, Digest& digest);

// Returns true if both files have the same bytes; reads them only if their sizes agree.
[[nodiscard]] bool have_same_bytes(const ExtraFile& a, const ExtraFile& b,
                                   WritableStorage& storage);

// Returns the content of a companion file.
[[nodiscard]] std::string text_of(const ExtraFile& extra, WritableStorage& storage);

// Writes a new file `path` and flushes it to disk. Returns its size. Throws Error "io.changed" if
// the copied file changes meanwhile.
std::uint64_t write_extra(WritableStorage& storage, const ExtraFile& extra,
                          const std::string& path);

// Name of ModelOpt's config file, which repeats the section in config.json.
inline constexpr std::string_view claim_name = "hf_quant_config.json";

// Returns true if the catalog, or its first checkpoint, contains the weights of an adapter in a
// PEFT folder. Libraries treat a folder with adapter_config.json as an adapter.
[[nodiscard]] bool is_adapter(const Catalog& catalog);
inline constexpr std::string_view adapter_stem = "adapter_model";
// Returns true for the path of an adapter's weights.
[[nodiscard]] bool is_adapter_file(std::string_view path);
inline constexpr std::string_view adapter_config_name = "adapter_config.json";

// Returns true for names of files other than config.json that declare an encoding.
[[nodiscard]] bool is_claim(std::string_view name);

// Reads config.json and finds the files in the checkpoint's folder that declare an encoding. Files
// that a host denies, as some hosts do for missing files, are in `denied` and declare nothing. The
// result is empty for GGUF files, which need no config. Throws the errors of find_config(), but
// ignores malformed files if the checkpoint has no codes.
[[nodiscard]] ModelFolder claims_beside(const Catalog& catalog);

// Returns the name of the file that declares an encoding, or an empty string.
[[nodiscard]] std::string_view claiming_file(const ModelFolder& folder);
// Returns the error for a declared encoding that no tensor confirms. `root`: the model's folder, or
// empty.
[[nodiscard]] Finding unread_claim(std::string_view file, std::string_view root = {});

// Adds a finding for each kind of file that is not copied, except for adapters in the catalog,
// which are merged. `denied`: names of files that the host denies.
void tell_left(const ModelFolder& folder, const std::vector<std::string>& denied,
               const Catalog& catalog, std::vector<Finding>& findings);

// Drops the files that declare the source's encoding, because the output has a different one.
void drop_claims(std::vector<ExtraFile>& files, std::vector<Finding>& findings);

}  // namespace loadstone
