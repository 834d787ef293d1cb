// Names in folders of those hosts that list them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "storage/remote/address.h"
#include "storage/remote/http_client.h"

namespace loadstone {

// Names of the files in one folder of a hub's repository, sorted. `address` is its "tree" of the
// API. Throws Error as RemoteFile does.
[[nodiscard]] std::vector<std::string> list_hub(HttpClient& client, const Address& address);

// Names of the objects right below `prefix`, which is empty or ends in a slash, sorted. `address`
// is the bucket's. Throws Error as RemoteFile does.
[[nodiscard]] std::vector<std::string> list_s3(HttpClient& client, const Address& address,
                                               const std::string& prefix);

// ---- for tests

// Adds the names below the prefix in one page of a bucket's list, and returns the token of the next
// page, empty after the last one. Throws Error "io.remote" for an invalid list.
[[nodiscard]] std::string take_s3_page(std::string_view text, std::string_view prefix,
                                       const std::string& path, std::vector<std::string>& names);

// Returns the URL of rel="next" in a Link header, or an empty text.
[[nodiscard]] std::string next_link(std::string_view header);

}  // namespace loadstone
