// Small files that stand beside the model's: checked before, and written in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/digest.h"
#include "loadstone/convert.h"

namespace loadstone {

// "a" and "a/b" for "a/b/c".
template <typename Visit>
void for_each_folder(const std::string& name, const Visit& visit) {
  for (std::size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
    visit(name.substr(0, at));
  }
}

// Throws Error "convert.extra" for an invalid or repeated name, a link, anything else that is not a
// regular file, and a file too large for a companion.
void check_extras(const Conversion& conversion, WritableStorage& storage);

// Of all of them.
[[nodiscard]] std::uint64_t extra_bytes(const Conversion& conversion, WritableStorage& storage);

[[nodiscard]] bool is_extra_name(const Conversion& conversion, const std::string& name) noexcept;

// Returns true if extras are below this folder.
[[nodiscard]] bool has_folder(const Conversion& conversion, const std::string& name) noexcept;
// Returns true if the folder `name` in `path` holds extras and nothing else.
[[nodiscard]] bool is_extra_folder(const Conversion& conversion, WritableStorage& storage,
                                   const std::string& path, const std::string& name);

// Adds the content of the files beside the model: text, or the bytes of the file that is copied.
void add_extras(const Conversion& conversion, WritableStorage& storage, Digest& digest);

// Returns true if both files hold the same bytes, which are read only if their sizes agree.
[[nodiscard]] bool have_same_bytes(const ExtraFile& a, const ExtraFile& b);

// Returns the content.
[[nodiscard]] std::string text_of(const ExtraFile& extra);

// Under `path`, which has nothing under it yet, and on the disk. Returns its size. Throws Error
// "io.changed" where the file that is copied changes meanwhile.
std::uint64_t write_extra(WritableStorage& storage, const ExtraFile& extra,
                          const std::string& path);

}  // namespace loadstone
