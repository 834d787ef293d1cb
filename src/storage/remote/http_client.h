// Sends HTTP requests over persistent connections.
#pragma once

#include <curl/curl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/remote.h"
#include "storage/remote/address.h"
#include "storage/remote/backoff.h"
#include "storage/remote/blocks.h"
#include "storage/remote/http_response.h"

namespace loadstone {

inline constexpr int redirects_max = 5;

// Receives the body of a response with status 200 or 206.
class BodySink {
 public:
  virtual ~BodySink() = default;
  // Called with the header of a 200 or 206. Throws Error if the body is not the requested one.
  virtual void begin(const HttpResponse& response) = 0;
  // Throws Error if the body has more bytes than requested.
  virtual void take(std::span<const std::byte> bytes) = 0;
};

struct HttpRequest {
  std::string url;
  std::string range;  // such as "0-99"; empty for the whole file
  Signing signing = Signing::none;
  bool may_be_private = true;  // false: direct connections to private networks are rejected
  std::string path = {};       // the file to name in errors
};

// The result of one request, whatever the response's status.
struct HttpResult {
  HttpResponse response;
  CURLcode code = CURLE_OK;
  std::string problem;              // description of a connection problem
  bool is_private_address = false;  // the request reached a private address, without a proxy
  bool is_private_refused = false;  // loadstone did not connect, because the address is private
};

// Thread-safe. Each thread uses a separate connection during a request and returns it afterwards.
// In a child after fork(), the client starts without connections.
class HttpClient {
 public:
  explicit HttpClient(RemoteOptions options);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  [[nodiscard]] const RemoteOptions& options() const noexcept { return options_; }

  // Returns the cache that all files of this client share.
  [[nodiscard]] Blocks& blocks() noexcept { return blocks_; }

  // Does not follow redirects. Throws errors of the sink, and Error "cancelled" if the caller
  // cancels.
  [[nodiscard]] HttpResult get(const HttpRequest& request, BodySink& sink);
  // Returns the initial state for the attempts of one request.
  [[nodiscard]] Backoff backoff() const noexcept {
    return {options_.first_wait_ms, options_.attempts_max};
  }
  // Sleeps before the next attempt. Returns false, without sleeping, if a further attempt is not
  // worthwhile or all attempts are used up. `path`: the file or folder of the request.
  // `is_reached`: whether the host has answered before.
  // Throws Error "cancelled" if the caller cancels.
  [[nodiscard]] bool waits(Backoff& backoff, const HttpResult& result, const std::string& path,
                           bool is_reached) const;
  // Throws Error "cancelled" if the caller cancels.
  void require_wanted() const;

 private:
  class Lease;
  friend struct Transfer;
  void pause(std::chrono::milliseconds time) const;
  void prepare(CURL* handle, const HttpRequest& request, const std::string& proxy,
               struct Transfer& transfer) const;

  const RemoteOptions options_;
  Blocks blocks_;
  std::mutex mutex_;
  std::vector<CURL*> idle_;  // guarded by mutex_
  long process_ = 0;         // process that owns the connections; guarded by mutex_
};

[[nodiscard]] bool is_certificate_problem(CURLcode code) noexcept;
// Returns the absolute URL of a Location header, or an empty string if it is invalid.
[[nodiscard]] std::string redirected_url(const std::string& from, const std::string& location);
// Returns scheme, host and port, such as "https://host:443"; empty if the text is not a URL.
[[nodiscard]] std::string origin_of(const std::string& url);

}  // namespace loadstone
