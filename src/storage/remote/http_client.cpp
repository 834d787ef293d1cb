#include "storage/remote/http_client.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "base/text.h"
#include "loadstone/error.h"
#include "loadstone/version.h"
#include "storage/remote/no_proxy.h"
#include "storage/remote/private_address.h"
#include "storage/remote_memory.h"
#include "storage/stop.h"

namespace loadstone {

namespace {

constexpr long connect_milliseconds = 30'000;
// Interval of checks for cancellation during a pause. During a transfer, libcurl's callback checks.
constexpr auto watch_interval = std::chrono::milliseconds(50);
constexpr long buffer_bytes = remote_buffer_bytes;
// Maximum number of bytes of an unwanted body to read, which keeps the connection usable.
constexpr std::uint64_t ignored_bytes_max = 64 << 10;
constexpr std::uint64_t header_bytes_max = 256 << 10;
// A connection that is slower for RemoteOptions::stall_seconds counts as lost.
constexpr long slow_bytes_a_second = 1024;

using Url = std::unique_ptr<CURLU, void (*)(CURLU*)>;

Url parsed(const std::string& text) {
  Url url(curl_url(), &curl_url_cleanup);
  if (url &&
      curl_url_set(url.get(), CURLUPART_URL, text.c_str(), CURLU_NON_SUPPORT_SCHEME) != CURLUE_OK) {
    url.reset();
  }
  return url;
}

std::string part_of(CURLU* url, CURLUPart part, unsigned flags = 0) {
  char* text = nullptr;
  if (curl_url_get(url, part, &text, flags) != CURLUE_OK) return {};
  std::string copy(text);
  curl_free(text);
  return copy;
}

std::string host_of(const std::string& text) {
  const Url url = parsed(text);
  return url ? part_of(url.get(), CURLUPART_HOST) : std::string();
}

void initialise() {
  static const CURLcode code = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (code != CURLE_OK) throw std::bad_alloc();
}

// CA files of several distributions. The libcurl in a wheel searches only the path of the
// distribution on which it was built.
constexpr std::array<const char*, 4> ca_files = {"/etc/ssl/certs/ca-certificates.crt",
                                                 "/etc/pki/tls/certs/ca-bundle.crt",
                                                 "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"};

// Returns the CA file to pass to libcurl. Empty if libcurl needs none, if libcurl's own file
// exists, or if no known file exists.
const std::string& system_ca_file() {
  static const std::string path = [] {
    const char* const own = curl_version_info(CURLVERSION_NOW)->cainfo;
    if (own == nullptr || ::access(own, R_OK) == 0) return std::string();
    const auto* const found =
        std::ranges::find_if(ca_files, [](const char* each) { return ::access(each, R_OK) == 0; });
    return found == ca_files.end() ? std::string() : std::string(*found);
  }();
  return path;
}

// Returns true for libcurl's codes for a header line that exceeds libcurl's own limit.
bool is_too_long(CURLcode code) noexcept {
  constexpr int too_large = 100;  // CURLE_TOO_LARGE of libcurl 8.6 and later
  return code == CURLE_OUT_OF_MEMORY || static_cast<int>(code) == too_large;
}

Error too_long(const HttpRequest& request) {
  return Error("io.remote", "the header of the host's response is too long",
               {.path = request.path,
                .found = "a response of " + origin_of(request.url),
                .expected = "at most " + human_bytes(header_bytes_max)});
}

}  // namespace

// State of one request, for libcurl's callbacks. Not thread-safe.
struct Transfer {
  const HttpClient& client;
  const HttpRequest& request;
  HttpResponse response;
  BodySink& sink;
  bool may_be_private;
  bool is_private_refused = false;
  bool has_begun = false;  // true once the sink receives the body
  std::uint64_t ignored_bytes = 0;
  std::uint64_t header_bytes = 0;
  std::exception_ptr failure = nullptr;

  [[nodiscard]] bool is_good() const noexcept {
    return response.status == 200 || response.status == 206;
  }

  static std::size_t on_header(char* data, std::size_t size, std::size_t count, void* self) {
    auto& transfer = *static_cast<Transfer*>(self);
    try {
      transfer.header_bytes += size * count;
      if (transfer.header_bytes > header_bytes_max) {
        throw too_long(transfer.request);
      }
      transfer.response.take_line({data, size * count});
    } catch (...) {
      transfer.failure = std::current_exception();
      return 0;
    }
    return size * count;
  }

  static std::size_t on_body(char* data, std::size_t size, std::size_t count, void* self) {
    auto& transfer = *static_cast<Transfer*>(self);
    const std::size_t bytes = size * count;
    try {
      if (!transfer.is_good()) {
        transfer.ignored_bytes += bytes;
        return transfer.ignored_bytes > ignored_bytes_max ? 0 : bytes;
      }
      transfer.begin();
      transfer.sink.take(std::as_bytes(std::span(data, bytes)));
    } catch (...) {
      transfer.failure = std::current_exception();
      return 0;
    }
    return bytes;
  }

  static curl_socket_t on_socket(void* self, curlsocktype, curl_sockaddr* address) {
    auto& transfer = *static_cast<Transfer*>(self);
    if (!transfer.may_be_private && is_private_address(address->addr)) {
      transfer.is_private_refused = true;
      return CURL_SOCKET_BAD;
    }
    return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
  }

  // Called before each request, even if the request reuses an idle connection and libcurl opens no
  // socket.
  static int on_connected(void* self, char* address, char*, int, int) {
    auto& transfer = *static_cast<Transfer*>(self);
    if (transfer.may_be_private || is_private_address(std::string(address)) == false) {
      return CURL_PREREQFUNC_OK;
    }
    transfer.is_private_refused = true;
    return CURL_PREREQFUNC_ABORT;
  }

  // Called about ten times a second, and at least once a second without data.
  static int on_progress(void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    auto& transfer = *static_cast<Transfer*>(self);
    try {
      transfer.client.require_wanted();
    } catch (...) {
      transfer.failure = std::current_exception();
      return 1;
    }
    return 0;
  }

  void begin() {
    if (has_begun) return;
    has_begun = true;
    sink.begin(response);
  }
};

// Lends a connection to one request.
class HttpClient::Lease {
 public:
  explicit Lease(HttpClient& client) : client_(client) {
    {
      const std::lock_guard lock(client.mutex_);
      // After a fork(), the connections belong to the parent process, so they are dropped here
      // without being closed.
      if (client.process_ != ::getpid()) client.idle_.clear();
      client.process_ = ::getpid();
      if (!client.idle_.empty()) {
        handle_ = client.idle_.back();
        client.idle_.pop_back();
      }
    }
    if (handle_ == nullptr) handle_ = curl_easy_init();
    if (handle_ == nullptr) throw std::bad_alloc();
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    curl_easy_reset(handle_);  // keeps connections
    try {
      const std::lock_guard lock(client_.mutex_);
      client_.idle_.push_back(handle_);
    } catch (...) {
      curl_easy_cleanup(handle_);
    }
  }
  [[nodiscard]] CURL* get() const noexcept { return handle_; }

 private:
  HttpClient& client_;
  CURL* handle_ = nullptr;
};

namespace {

// Header lines of a request.
class Lines {
 public:
  void add(const std::string& line) {
    curl_slist* const more = curl_slist_append(lines_, line.c_str());
    if (more == nullptr) throw std::bad_alloc();
    lines_ = more;
  }
  Lines() = default;
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;
  ~Lines() { curl_slist_free_all(lines_); }
  [[nodiscard]] curl_slist* get() const noexcept { return lines_; }

 private:
  curl_slist* lines_ = nullptr;
};

template <typename Value>
void set(CURL* handle, CURLoption option, Value value) {
  if (curl_easy_setopt(handle, option, value) == CURLE_OUT_OF_MEMORY) throw std::bad_alloc();
}

bool is_connected_privately(CURL* handle) {
  char* text = nullptr;
  if (curl_easy_getinfo(handle, CURLINFO_PRIMARY_IP, &text) != CURLE_OK || text == nullptr) {
    return false;
  }
  return is_private_address(std::string(text)).value_or(false);
}

}  // namespace

HttpClient::HttpClient(RemoteOptions options) : options_(std::move(options)) { initialise(); }

HttpClient::~HttpClient() {
  if (process_ != ::getpid()) return;
  for (CURL* const handle : idle_) curl_easy_cleanup(handle);
}

// Sets all options that libcurl would otherwise take from the environment.
void HttpClient::prepare(CURL* handle, const HttpRequest& request, const std::string& proxy,
                         Transfer& transfer) const {
  set(handle, CURLOPT_URL, request.url.c_str());
  set(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  set(handle, CURLOPT_FOLLOWLOCATION, 0L);
  set(handle, CURLOPT_NOSIGNAL, 1L);
  set(handle, CURLOPT_USERAGENT, "loadstone/" LOADSTONE_VERSION);
  set(handle, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_2TLS));
  set(handle, CURLOPT_PROXY, proxy.c_str());
  set(handle, CURLOPT_NOPROXY, "");  // get() has already decided about the proxy
  set(handle, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
  const std::string& ca_file = options_.ca_file.empty() ? system_ca_file() : options_.ca_file;
  if (!ca_file.empty()) set(handle, CURLOPT_CAINFO, ca_file.c_str());
  set(handle, CURLOPT_CONNECTTIMEOUT_MS, connect_milliseconds);
  set(handle, CURLOPT_LOW_SPEED_LIMIT, slow_bytes_a_second);
  set(handle, CURLOPT_LOW_SPEED_TIME, static_cast<long>(options_.stall_seconds));
  set(handle, CURLOPT_BUFFERSIZE, buffer_bytes);
  if (!request.range.empty()) set(handle, CURLOPT_RANGE, request.range.c_str());
  set(handle, CURLOPT_HEADERFUNCTION, &Transfer::on_header);
  set(handle, CURLOPT_HEADERDATA, &transfer);
  set(handle, CURLOPT_WRITEFUNCTION, &Transfer::on_body);
  set(handle, CURLOPT_WRITEDATA, &transfer);
  set(handle, CURLOPT_OPENSOCKETFUNCTION, &Transfer::on_socket);
  set(handle, CURLOPT_OPENSOCKETDATA, &transfer);
  set(handle, CURLOPT_PREREQFUNCTION, &Transfer::on_connected);
  set(handle, CURLOPT_PREREQDATA, &transfer);
  set(handle, CURLOPT_NOPROGRESS, 0L);
  set(handle, CURLOPT_XFERINFOFUNCTION, &Transfer::on_progress);
  set(handle, CURLOPT_XFERINFODATA, &transfer);
}

void HttpClient::require_wanted() const {
  if (StopScope::is_stopped() || (options_.is_stopped && options_.is_stopped())) {
    throw Error("cancelled", "the caller stopped the operation");
  }
}

void HttpClient::pause(std::chrono::milliseconds time) const {
  const auto end = std::chrono::steady_clock::now() + time;
  while (true) {
    require_wanted();
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= left.zero()) return;
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(left, watch_interval));
  }
}

// Does not retry a host that was never reached, because its name is more likely wrong than the host
// temporarily down.
static bool is_worth_retrying(const HttpResult& result, bool is_reached) noexcept {
  if (result.is_private_refused) return false;
  switch (result.code) {
    case CURLE_OK:
      return is_temporary(result.response.status) || result.response.status == 200 ||
             result.response.status == 206;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
      return is_reached;
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_NOT_BUILT_IN:
    case CURLE_BAD_FUNCTION_ARGUMENT:
      return false;
    default:
      return !is_certificate_problem(result.code);
  }
}

static std::string reason_of(const HttpResult& result) {
  if (result.code != CURLE_OK) return result.problem;
  const long status = result.response.status;
  const bool is_good = status == 200 || status == 206;
  return is_good ? "the response ends too early" : fmt::format("status {}", status);
}

bool HttpClient::waits(Backoff& backoff, const HttpResult& result, const std::string& path,
                       bool is_reached) const {
  if (!is_worth_retrying(result, is_reached)) return false;
  const auto time = backoff.next(result.response.retry_after_seconds);
  if (time && options_.on_retry) options_.on_retry({path, reason_of(result), *time});
  if (time) pause(*time);
  return time.has_value();
}

HttpResult HttpClient::get(const HttpRequest& request, BodySink& sink) {
  const Lease lease(*this);
  CURL* const handle = lease.get();
  // Addresses can be checked only for direct connections, because a proxy makes all other
  // connections.
  const bool is_direct =
      options_.proxy.empty() || is_without_proxy(host_of(request.url), options_.no_proxy);
  Transfer transfer = {.client = *this,
                       .request = request,
                       .response = {},
                       .sink = sink,
                       .may_be_private = request.may_be_private || !is_direct};
  prepare(handle, request, is_direct ? std::string() : options_.proxy, transfer);
  Lines lines;
  if (request.signing == Signing::bearer) {
    set(handle, CURLOPT_HTTPAUTH, static_cast<long>(CURLAUTH_BEARER));
    set(handle, CURLOPT_XOAUTH2_BEARER, options_.hub_token.c_str());
  } else if (request.signing == Signing::aws) {
    set(handle, CURLOPT_AWS_SIGV4, ("aws:amz:" + options_.s3_region + ":s3").c_str());
    set(handle, CURLOPT_USERNAME, options_.s3_access_key.c_str());
    set(handle, CURLOPT_PASSWORD, options_.s3_secret_key.c_str());
    lines.add("x-amz-content-sha256: UNSIGNED-PAYLOAD");
    if (!options_.s3_session_token.empty()) {
      lines.add("x-amz-security-token: " + options_.s3_session_token);
    }
  }
  // A signed request lacks this header, because proxies may change it.
  if (request.signing != Signing::aws) lines.add("Accept-Encoding: identity");
  set(handle, CURLOPT_HTTPHEADER, lines.get());
  HttpResult result;
  result.code = curl_easy_perform(handle);
  if (transfer.failure) std::rethrow_exception(transfer.failure);
  if (is_too_long(result.code)) throw too_long(request);
  if (result.code == CURLE_OK && transfer.is_good()) transfer.begin();  // the body was empty
  const bool is_passed_over = transfer.ignored_bytes > ignored_bytes_max;
  if (is_passed_over) result.code = CURLE_OK;
  if (result.code != CURLE_OK) result.problem = curl_easy_strerror(result.code);
  result.is_private_address = is_direct && is_connected_privately(handle);
  result.is_private_refused = transfer.is_private_refused;
  result.response = std::move(transfer.response);
  return result;
}

bool is_certificate_problem(CURLcode code) noexcept {
  return code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE ||
         code == CURLE_SSL_ISSUER_ERROR || code == CURLE_SSL_PINNEDPUBKEYNOTMATCH ||
         code == CURLE_SSL_INVALIDCERTSTATUS;
}

std::string redirected_url(const std::string& from, const std::string& location) {
  if (location.empty()) return {};
  const Url url = parsed(from);
  if (!url || curl_url_set(url.get(), CURLUPART_URL, location.c_str(), CURLU_NON_SUPPORT_SCHEME) !=
                  CURLUE_OK) {
    return {};
  }
  return part_of(url.get(), CURLUPART_URL);
}

std::string origin_of(const std::string& text) {
  const Url url = parsed(text);
  if (!url) return {};
  return part_of(url.get(), CURLUPART_SCHEME) + "://" + part_of(url.get(), CURLUPART_HOST) + ":" +
         part_of(url.get(), CURLUPART_PORT, CURLU_DEFAULT_PORT);
}

}  // namespace loadstone
