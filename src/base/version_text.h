// The version of a remote file: an ETag, or a date.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

// For messages. A text that is neither hex digits nor a date may be anything that the host was
// sent, a signature among them: of that its digest.
[[nodiscard]] std::string version_text(std::string_view version);

}  // namespace loadstone
