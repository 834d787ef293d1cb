// Memory spread over the machine's memory nodes.
#pragma once

namespace loadstone {

// Pages that the calling thread is the first to touch come from all nodes in turns, until it ends.
// False: the system cannot, or does not let this process.
[[nodiscard]] bool interleave_new_pages() noexcept;

}  // namespace loadstone
