// Requests over persistent connections.
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

// Receives the body of a successful answer.
class BodySink {
 public:
  virtual ~BodySink() = default;
  // Called with the header of a 200 or 206; throws Error if the body would be the wrong one.
  virtual void begin(const HttpResponse& response) = 0;
  // Throws Error for more bytes than requested.
  virtual void take(std::span<const std::byte> bytes) = 0;
};

struct HttpRequest {
  std::string url;
  std::string range;  // "0-99"; empty: all
  Signing signing = Signing::none;
  bool may_be_private = true;  // false: direct connections to private networks are rejected
  std::string path = {};       // the file that errors name
};

// The result of one request, including answers other than 200 and 206.
struct HttpResult {
  HttpResponse response;
  CURLcode code = CURLE_OK;
  std::string problem;              // of the connection, for people
  bool is_private_address = false;  // who answered, without a proxy
  bool is_private_refused = false;  // an address that was not connected to
};

// Thread-safe. Each thread uses a separate connection during a request and returns it afterwards.
// In a child after fork() it starts without connections.
class HttpClient {
 public:
  explicit HttpClient(RemoteOptions options);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  [[nodiscard]] const RemoteOptions& options() const noexcept { return options_; }

  // Shared by all files that this client reads.
  [[nodiscard]] Blocks& blocks() noexcept { return blocks_; }

  // Does not follow redirects. Throws errors of the sink, and Error "cancelled" if the caller
  // cancels.
  [[nodiscard]] HttpResult get(const HttpRequest& request, BodySink& sink);
  // State for the attempts of one request.
  [[nodiscard]] Backoff backoff() const noexcept {
    return {options_.first_wait_ms, options_.attempts_max};
  }
  // Sleeps before the next attempt. False: another attempt is not worthwhile, or there were enough.
  // `is_reached`: the host has answered before. Throws Error "cancelled" if the caller cancels.
  [[nodiscard]] bool waits(Backoff& backoff, const HttpResult& result, bool is_reached) const;

 private:
  class Lease;
  friend struct Transfer;
  void require_wanted() const;
  void pause(std::chrono::milliseconds time) const;
  void prepare(CURL* handle, const HttpRequest& request, const std::string& proxy,
               struct Transfer& transfer) const;

  const RemoteOptions options_;
  Blocks blocks_;
  std::mutex mutex_;
  std::vector<CURL*> idle_;  // guarded by mutex_
  long process_ = 0;         // whose connections they are; guarded by mutex_
};

[[nodiscard]] bool is_certificate_problem(CURLcode code) noexcept;
// Returns the absolute URL of a Location header, or an empty text if it is invalid.
[[nodiscard]] std::string redirected_url(const std::string& from, const std::string& location);
// Returns "https://host:443": scheme, host and port; empty if the text is not a URL.
[[nodiscard]] std::string origin_of(const std::string& url);

}  // namespace loadstone
