// Lists the names in folders of hosts that support it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "storage/remote/address.h"
#include "storage/remote/http_client.h"

namespace loadstone {

// Returns the sorted names of the files in one folder of a hub's repository. `address`: the folder
// in the hub's "tree" API. Throws Error as RemoteFile does.
[[nodiscard]] std::vector<std::string> list_hub(HttpClient& client, const Address& address);

// Returns the sorted names of the objects directly below `prefix`, which must be empty or end in a
// slash. `address`: the address of the bucket. Throws Error as RemoteFile does.
[[nodiscard]] std::vector<std::string> list_s3(HttpClient& client, const Address& address,
                                               const std::string& prefix);

// ---- for tests

// Adds the names below the prefix from one page of a bucket's list. Returns the token of the next
// page, which is empty after the last page. Throws Error "io.remote" for an invalid list.
[[nodiscard]] std::string take_s3_page(std::string_view text, std::string_view prefix,
                                       const std::string& path, std::vector<std::string>& names);

// Returns the URL of rel="next" in a Link header, or an empty string.
[[nodiscard]] std::string next_link(std::string_view header);

}  // namespace loadstone
