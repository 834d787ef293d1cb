#include "storage/remote_environment.h"

#include <initializer_list>
#include <span>

#include "loadstone/error.h"

namespace loadstone {

namespace {

using Variable = std::function<std::string(const std::string&)>;

constexpr std::uint64_t token_bytes_max = 4096;

std::string first_of(const Variable& variable, std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    if (std::string value = variable(name); !value.empty()) return value;
  }
  return {};
}

void take(std::string& option, std::string value) {
  if (!value.empty()) option = std::move(value);
}

std::string token_path(const Variable& variable) {
  if (std::string path = variable("HF_TOKEN_PATH"); !path.empty()) return path;
  if (const std::string home = variable("HF_HOME"); !home.empty()) return home + "/token";
  if (const std::string cache = variable("XDG_CACHE_HOME"); !cache.empty()) {
    return cache + "/huggingface/token";
  }
  const std::string home = variable("HOME");
  return home.empty() ? std::string() : home + "/.cache/huggingface/token";
}

// Returns the token that the hub's own programs have stored, or an empty string.
std::string token_from_file(const std::string& path) {
  if (path.empty()) return {};
  try {
    const auto file = local_storage().open(path);
    const std::uint64_t bytes = file->identity().bytes;
    if (bytes > token_bytes_max) return {};
    std::string text(bytes, '\0');
    file->read(0, std::as_writable_bytes(std::span(text)));
    while (!text.empty() && static_cast<unsigned char>(text.back()) <= ' ') text.pop_back();
    return text;
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

RemoteOptions remote_options_from(const Variable& variable) {
  RemoteOptions options;
  options.proxy = first_of(variable, {"https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"});
  options.no_proxy = first_of(variable, {"no_proxy", "NO_PROXY"});
  options.ca_file = variable("SSL_CERT_FILE");
  take(options.hub_endpoint, variable("HF_ENDPOINT"));
  options.hub_token = variable("HF_TOKEN");
  const bool is_anonymous = !variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").empty();
  if (options.hub_token.empty() && !is_anonymous) {
    options.hub_token = token_from_file(token_path(variable));
  }
  options.s3_endpoint = first_of(variable, {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"});
  take(options.s3_region, first_of(variable, {"AWS_REGION", "AWS_DEFAULT_REGION"}));
  options.s3_access_key = variable("AWS_ACCESS_KEY_ID");
  options.s3_secret_key = variable("AWS_SECRET_ACCESS_KEY");
  options.s3_session_token = variable("AWS_SESSION_TOKEN");
  return options;
}

}  // namespace loadstone
