// Explains why a host refuses a request.
#pragma once

#include <string_view>

#include "loadstone/remote.h"
#include "storage/remote/address.h"

namespace loadstone {

// Throws Error "io.denied" for status 401 and 403, and "io.not_found" for 404 and 410. The error
// names what the host needs. Returns for any other status. `what`: "file" or "folder".
void refuse_status(const Address& address, const RemoteOptions& options, long status,
                   std::string_view what);

}  // namespace loadstone
