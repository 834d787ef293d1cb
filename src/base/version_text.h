// Formats the version of a remote file, which is an ETag or a date.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

// Returns the version for messages. If the text is neither hex digits nor a date, it may contain
// secrets of the request, such as a signature, so its digest is returned.
[[nodiscard]] std::string version_text(std::string_view version);

}  // namespace loadstone
