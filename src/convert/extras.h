// Small files that stand beside the model's: checked before, and written in pieces.
#pragma once

#include <cstdint>
#include <string>

#include "base/digest.h"
#include "loadstone/convert.h"

namespace loadstone {

// Throws Error "convert.extra" for a name that is none or another file's, and for what is a link,
// no regular file, or larger than a file beside a model is.
void check_extras(const Conversion& conversion);

// Of all of them.
[[nodiscard]] std::uint64_t extra_bytes(const Conversion& conversion);

[[nodiscard]] bool is_extra_name(const Conversion& conversion, const std::string& name) noexcept;

// Adds the content of the files beside the model: text, or the bytes of the file that is copied.
void add_extras(const Conversion& conversion, Digest& digest);

// Under `path`, which has nothing under it yet, and on the disk. Returns its size. Throws Error
// "io.changed" where the file that is copied changes meanwhile.
std::uint64_t write_extra(WritableStorage& storage, const ExtraFile& extra,
                          const std::string& path);

}  // namespace loadstone
