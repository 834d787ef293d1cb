#include "storage/remote/remote_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "base/version_text.h"
#include "loadstone/error.h"
#include "storage/remote/refusal.h"
#include "storage/remote_memory.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

// Bytes of the first request. Most headers fit, so that one round trip is enough.
constexpr std::uint64_t probe_bytes = 16 << 10;
// Shorter reads are served from blocks, whose size grows if the reader uses them up.
constexpr std::uint64_t small_bytes = 16 << 10;
constexpr std::uint64_t block_bytes_max = remote_block_bytes_max;
// Minimum bytes for an attempt to count as progress, because a server that breaks off after a few
// bytes may do so for ever.
constexpr std::uint64_t progress_bytes_min = 16 << 10;

std::string range_text(std::uint64_t begin, std::uint64_t end) {
  return fmt::format("{}-{}", begin, end - 1);
}

std::uint64_t total_of(std::span<const std::span<std::byte>> pieces) {
  std::uint64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes;
}

// Copies bytes into consecutive pieces. Not thread-safe.
class Scatter {
 public:
  explicit Scatter(std::span<const std::span<std::byte>> pieces) : pieces_(pieces) {}

  // Precondition: the bytes fit the rest of the pieces.
  void add(std::span<const std::byte> bytes) noexcept {
    while (!bytes.empty()) {
      while (done_ == pieces_[piece_].size()) {
        ++piece_;
        done_ = 0;
      }
      const std::size_t count = std::min(bytes.size(), pieces_[piece_].size() - done_);
      std::memcpy(pieces_[piece_].data() + done_, bytes.data(), count);
      done_ += count;
      bytes = bytes.subspan(count);
    }
  }

 private:
  std::span<const std::span<std::byte>> pieces_;
  std::size_t piece_ = 0;
  std::size_t done_ = 0;
};

}  // namespace

// Receives the beginning of a file whose size and version are still unknown.
class RemoteFile::ProbeSink final : public BodySink {
 public:
  explicit ProbeSink(const RemoteFile& file) : file_(file) {}

  void begin(const HttpResponse& response) override {
    bytes.clear();
    if (!is_plain(response)) {
      file_.fail("io.remote", "the server sends the file in a different content encoding",
                 printable(response.content_encoding), "identity");
    }
    if (response.status == 206) {
      const auto& range = response.content_range;
      const bool is_beginning = range && range->begin == 0 && range->total && *range->total > 0 &&
                                range->end <= *range->total &&
                                range->end == std::min(probe_bytes, *range->total);
      if (!is_beginning) file_.refuse_range(response, 0, probe_bytes);
      total = *range->total;
      expected_ = range->end;
    } else {
      // A response with the whole file is valid too, if the file is no longer than the range.
      if (!response.content_length || *response.content_length > probe_bytes) {
        file_.fail(
            "io.remote",
            "the server does not support range requests, so loadstone can read only the whole file",
            "status 200", "status 206");
      }
      total = expected_ = *response.content_length;
    }
  }
  void take(std::span<const std::byte> more) override {
    if (more.size() > expected_ - bytes.size()) {
      file_.fail("io.remote", "the server sends more bytes than loadstone requested", {},
                 counted(expected_, "byte"));
    }
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  [[nodiscard]] bool is_whole() const noexcept { return bytes.size() == expected_; }

  std::uint64_t total = 0;
  std::vector<std::byte> bytes;

 private:
  const RemoteFile& file_;
  std::uint64_t expected_ = 0;
};

// Receives the rest of a range, after the bytes of earlier requests.
class RemoteFile::RangeSink final : public BodySink {
 public:
  RangeSink(const RemoteFile& file, std::uint64_t begin, std::uint64_t end,
            std::span<const std::span<std::byte>> pieces)
      : file_(file), at_(begin), end_(end), scatter_(pieces) {}

  void begin(const HttpResponse& response) override {
    file_.require_same(response);
    if (!is_plain(response)) {
      file_.fail("io.remote", "the server sends the file in a different content encoding",
                 printable(response.content_encoding), "identity", at_);
    }
    const std::uint64_t total = file_.identity_.bytes;
    if (response.status == 200) {
      if (at_ == 0 && end_ == total && response.content_length == total) return;
      file_.fail("io.remote", "the server sends the whole file instead of the requested range",
                 "status 200", "status 206", at_);
    }
    const auto& range = response.content_range;
    const bool is_asked = range && range->begin == at_ && range->end == end_ &&
                          (!response.content_length || *response.content_length == end_ - at_);
    if (!is_asked) file_.refuse_range(response, at_, end_);
  }
  void take(std::span<const std::byte> bytes) override {
    if (bytes.size() > end_ - at_) {
      file_.fail("io.remote", "the server sends more bytes than loadstone requested", {}, {}, end_);
    }
    scatter_.add(bytes);
    at_ += bytes.size();
  }
  [[nodiscard]] std::uint64_t at() const noexcept { return at_; }

 private:
  const RemoteFile& file_;
  std::uint64_t at_;
  std::uint64_t end_;
  Scatter scatter_;
};

RemoteFile::RemoteFile(std::shared_ptr<HttpClient> client, Address address, std::string* commit)
    : client_(std::move(client)), address_(std::move(address)) {
  probe(commit);
}

RemoteFile::~RemoteFile() { client_->blocks().forget(this); }

unsigned RemoteFile::reads_at_once() const noexcept { return client_->options().reads_at_once; }

void RemoteFile::probe(std::string* commit) {
  Backoff backoff = client_->backoff();
  while (true) {
    ProbeSink sink(*this);
    const HttpResult result = follow(range_text(0, probe_bytes), sink);
    const HttpResponse& response = result.response;
    if (commit != nullptr) *commit = response.commit;
    // An empty file has no valid range, so the host answers with status 416.
    const bool is_empty = result.code == CURLE_OK && response.status == 416 &&
                          response.content_range && response.content_range->total == 0;
    const bool is_good = response.status == 200 || response.status == 206;
    if (!is_empty && (result.code != CURLE_OK || !is_good || !sink.is_whole())) {
      if (!client_->waits(backoff, result, address_.path, is_known_)) refuse(result, 0);
      continue;
    }
    identity_.bytes = sink.total;
    seen_version_ = response.version();
    identity_.version = linked_etag_.empty() ? seen_version_ : linked_etag_;
    is_known_ = true;
    client_->blocks().keep(this, std::make_shared<const Block>(Block{0, std::move(sink.bytes)}));
    return;
  }
}

void RemoteFile::read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) {
  const std::uint64_t bytes = total_of(pieces);
  if (bytes == 0) return;
  if (offset > identity_.bytes || bytes > identity_.bytes - offset) {
    fail("io.short_read", "the file ends early", {}, {}, offset);
  }
  const std::uint64_t end = offset + bytes;
  if (bytes < small_bytes) {
    read_small(offset, end, pieces);
  } else {
    read_range(offset, end, pieces);
  }
}

void RemoteFile::read_small(std::uint64_t begin, std::uint64_t end,
                            std::span<const std::span<std::byte>> pieces) {
  std::shared_ptr<const Block> block = client_->blocks().find(this);
  std::uint64_t block_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    block_bytes = block_bytes_;
  }
  if (block == nullptr || !block->holds(begin, end)) {
    // A reader that continues after the last block is likely to continue further.
    const bool goes_on =
        block != nullptr && block->begin <= begin && begin <= block->begin + block->bytes.size();
    block_bytes = goes_on ? std::min(2 * block_bytes, block_bytes_max) : 0;
    block_bytes = std::max(block_bytes, small_bytes);
    Block next{begin, {}};
    next.bytes.resize(std::min(std::max(block_bytes, end - begin), identity_.bytes - begin));
    const std::span<std::byte> all(next.bytes);
    read_range(begin, begin + all.size(), {&all, 1});
    block = std::make_shared<const Block>(std::move(next));
    client_->blocks().keep(this, block);
    const std::lock_guard lock(mutex_);
    block_bytes_ = block_bytes;
  }
  Scatter scatter(pieces);
  scatter.add(std::span(block->bytes).subspan(begin - block->begin, end - begin));
}

void RemoteFile::read_range(std::uint64_t begin, std::uint64_t end,
                            std::span<const std::span<std::byte>> pieces) {
  Backoff backoff = client_->backoff();
  RangeSink sink(*this, begin, end, pieces);
  while (true) {
    const std::uint64_t before = sink.at();
    const HttpResult result = follow(range_text(before, end), sink);
    if (sink.at() == end) return;
    if (sink.at() - before >= progress_bytes_min) backoff.progressed();
    if (!client_->waits(backoff, result, address_.path, is_known_)) refuse(result, sink.at());
  }
}

void RemoteFile::refuse(const HttpResult& result, std::uint64_t offset) const {
  const HttpResponse& response = result.response;
  const std::string status = fmt::format("status {}", response.status);
  if (result.code != CURLE_OK && result.is_private_refused) {
    fail("io.redirect", "a public host redirects to an address of a private network");
  }
  if (result.code != CURLE_OK) {
    if (is_certificate_problem(result.code)) {
      fail("io.tls", "the host's certificate is not trusted", result.problem,
           "one of the trusted authorities (--ca-file, ca_file=)");
    }
    fail("io.remote", "the connection failed", result.problem, {}, offset);
  }
  if (is_known_ && (response.status == 404 || response.status == 410)) {
    fail("io.changed", "the file was removed from the host after it was opened", status);
  }
  refuse_status(address_, client_->options(), response.status, "file");
  if (response.status == 412 || (response.status == 416 && is_known_)) {
    fail("io.changed", "the file was replaced on the host after it was opened", status);
  }
  if (response.status == 200 || response.status == 206) {
    fail("io.remote", "the host's response ends too early", status, {}, offset);
  }
  fail("io.remote",
       is_temporary(response.status) ? "the host still rejects the request after several attempts"
                                     : "the host rejects the request",
       status, {}, offset);
}

void RemoteFile::refuse_range(const HttpResponse& response, std::uint64_t begin,
                              std::uint64_t end) const {
  // Shows only these fields, because other text may contain secrets of the request.
  std::string found = response.content_range ? response.content_range_text : "no Content-Range";
  if (response.content_length) found += fmt::format(", length {}", *response.content_length);
  fail("io.remote", "the server sends a different range than loadstone requested", found,
       fmt::format("bytes {}-{}/{}", begin, end - 1,
                   is_known_ ? std::to_string(identity_.bytes) : "*"),
       begin);
}

void RemoteFile::require_same(const HttpResponse& response) const {
  const auto changed = [&](const std::string& found, const std::string& expected) {
    fail("io.changed", "the file was replaced on the host while loadstone read it", found,
         expected);
  };
  if (response.version() != seen_version_) {
    changed(version_text(response.version()), version_text(seen_version_));
  }
  const auto total = response.status == 200   ? response.content_length
                     : response.content_range ? response.content_range->total
                                              : std::nullopt;
  if (total && *total != identity_.bytes) {
    changed(counted(*total, "byte"), counted(identity_.bytes, "byte"));
  }
}

// Makes one attempt. Goes directly to a known redirect. If this fails, asks the first host again,
// because signatures of redirects expire.
HttpResult RemoteFile::follow(const std::string& range, BodySink& sink) {
  bool was_cached = false;
  HttpResult result = ask(range, sink, was_cached);
  const long status = result.response.status;
  const bool is_stale = result.code == CURLE_OK && status >= 400 && !is_temporary(status);
  if (was_cached && is_stale) {
    {
      const std::lock_guard lock(mutex_);
      redirected_.clear();
    }
    result = ask(range, sink, was_cached);
  }
  return result;
}

HttpResult RemoteFile::ask(const std::string& range, BodySink& sink, bool& was_cached) {
  std::string url;
  {
    const std::lock_guard lock(mutex_);
    url = redirected_;
  }
  was_cached = !url.empty();
  if (!was_cached) url = address_.full_url();
  const std::string first_origin = origin_of(address_.url);
  std::string commit;  // from the last response that reports one
  for (int hop = 0; hop <= redirects_max; ++hop) {
    const bool is_first_host = origin_of(url) == first_origin;
    HttpResult result = client_->get({.url = url,
                                      .range = range,
                                      .signing = is_first_host ? address_.signing : Signing::none,
                                      .may_be_private = is_first_host || begins_private_,
                                      .path = address_.path},
                                     sink);
    const HttpResponse& response = result.response;
    if (!is_known_ && hop == 0) begins_private_ = result.is_private_address;
    if (!response.commit.empty()) commit = response.commit;
    if (!response.linked_etag.empty()) take_linked(response.linked_etag);
    if (result.code != CURLE_OK || !is_redirect(response.status)) {
      const bool is_good = response.status == 200 || response.status == 206;
      if (hop > 0 && result.code == CURLE_OK && is_good) {
        const std::lock_guard lock(mutex_);
        redirected_ = url;
      }
      result.response.commit = commit;
      return result;
    }
    url = redirect(url, response.location);
  }
  fail("io.redirect", "the host redirects the request too many times", {},
       fmt::format("at most {} redirects", redirects_max));
}

std::string RemoteFile::redirect(const std::string& from, const std::string& location) const {
  std::string to = redirected_url(from, location);
  const std::string shown =
      to.empty() ? "a text that is not a URL" : printable(public_location(to), shown_bytes_max);
  if (public_location(to) == public_location(from) + "/") {
    fail("io.not_found", "the URL is that of a folder", shown, "a slash at the end of the URL");
  }
  if (!is_http(to)) fail("io.redirect", "the host redirects to a URL other than https", shown);
  if (is_https(from) && !is_https(to)) {
    fail("io.redirect", "the host redirects from https to a connection without encryption", shown,
         "an https URL");
  }
  return to;
}

// Uses the hub's identity of the content, which is stronger than the identity from the serving
// host.
void RemoteFile::take_linked(const std::string& etag) {
  if (!is_known_) {
    linked_etag_ = etag;
  } else if (etag != linked_etag_) {
    fail("io.changed", "the file was replaced on the host while loadstone read it",
         version_text(etag), version_text(linked_etag_));
  }
}

void RemoteFile::fail(const char* code, std::string message, std::string found,
                      std::string expected, std::optional<std::uint64_t> offset) const {
  throw Error(code, std::move(message),
              {.path = address_.path,
               .found = std::move(found),
               .expected = std::move(expected),
               .byte_offset = offset});
}

}  // namespace loadstone
