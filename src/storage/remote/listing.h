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

// One page of a bucket's list: names below the prefix are added; the token of the next page is
// returned, empty after the last one. Throws Error "io.remote" for what is no such list.
[[nodiscard]] std::string take_s3_page(std::string_view text, std::string_view prefix,
                                       const std::string& path, std::vector<std::string>& names);

// The URL in a Link header that is called "next"; empty where there is none.
[[nodiscard]] std::string next_link(std::string_view header);

}  // namespace loadstone
