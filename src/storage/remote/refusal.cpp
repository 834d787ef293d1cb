#include "storage/remote/refusal.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "loadstone/error.h"
#include "storage/remote/http_client.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

constexpr const char* hub_token = "a token in HF_TOKEN (token= in Python)";
constexpr const char* gated = "; if it is gated, first accept its terms on its page";
constexpr const char* s3_keys =
    "keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (s3_access_key=, s3_secret_key= in "
    "Python)";
constexpr const char* whole_url =
    "the URL with its query: plans and pickles do not store the query, so pass the whole URL "
    "(CHECKPOINT on the command line, root= in Python) or open it first";

struct Explanation {
  std::string message;
  std::string expected{};
};

Explanation denied(const Address& address, bool is_hubs, long status) {
  const bool is_signed = address.signing != Signing::none;
  if (is_hubs && is_signed) {
    return {
        "the hub denies access: the token may be wrong or expired, or may not read this "
        "repository",
        fmt::format("{} of an account that may read the repository{}", hub_token, gated)};
  }
  if (is_hubs) {
    return {"the hub denies access: the repository does not exist, or needs a token",
            fmt::format("{}{}", hub_token, gated)};
  }
  if (is_s3(address.path)) {
    return {fmt::format(
                "the object store denies access: the keys {}",
                is_signed ? "may be wrong or expired, or may not read this bucket" : "are missing"),
            is_signed ? "" : s3_keys};
  }
  if (status == 401) {
    return {"the host requires a token, but loadstone sends tokens only to the hub (HF_ENDPOINT)",
            "a URL that needs no token, such as a signed URL"};
  }
  return {"the host denies access; a signature may be missing or expired",
          address.query.empty() ? whole_url : ""};
}

}  // namespace

void refuse_status(const Address& address, const RemoteOptions& options, long status,
                   std::string_view what) {
  const bool is_hubs =
      is_hub(address.path) || origin_of(address.url) == origin_of(options.hub_endpoint);
  const auto fail = [&](const char* code, Explanation why) {
    throw Error(code, std::move(why.message),
                {.path = address.path,
                 .found = fmt::format("status {}", status),
                 .expected = std::move(why.expected)});
  };
  if (status == 401 || status == 403) fail("io.denied", denied(address, is_hubs, status));
  if (status != 404 && status != 410) return;
  if (!is_hubs) fail("io.not_found", {fmt::format("the host does not have this {}", what)});
  fail("io.not_found",
       {fmt::format("the hub has no such repository, revision or {}, or the repository is private",
                    what),
        options.hub_token.empty() ? fmt::format("for a private repository, {}", hub_token) : ""});
}

}  // namespace loadstone
