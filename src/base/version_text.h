// The version of a remote file: an ETag, or a date.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

// For messages. A text other than hex digits or a date may contain secrets of the request, such as
// a signature, so its digest is returned.
[[nodiscard]] std::string version_text(std::string_view version);

}  // namespace loadstone
