// Reads a file by HTTP range requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loadstone/storage.h"
#include "storage/remote/address.h"
#include "storage/remote/backoff.h"
#include "storage/remote/http_client.h"

namespace loadstone {

// The first response determines size and version. Later responses must match, or Error "io.changed"
// is thrown, so no read mixes two files, and identity() sends no request. Thread-safe.
//
// A read is one request, which writes directly into the caller's memory. If the connection breaks,
// the next request continues at the missing byte. Small reads come from blocks, of which the client
// caches a few.
class RemoteFile final : public ByteSource {
 public:
  // Requests the file's beginning. Throws Error "io.not_found", "io.denied", "io.remote",
  // "io.redirect", "io.tls". `commit`: receives the commit of a hub's repository from the response,
  // even if the error is "io.not_found".
  RemoteFile(std::shared_ptr<HttpClient> client, Address address, std::string* commit = nullptr);
  ~RemoteFile() override;
  RemoteFile(const RemoteFile&) = delete;
  RemoteFile& operator=(const RemoteFile&) = delete;

  [[nodiscard]] const std::string& path() const noexcept override { return address_.path; }
  [[nodiscard]] FileIdentity identity() const override { return identity_; }
  [[nodiscard]] unsigned reads_at_once() const noexcept override;
  [[nodiscard]] bool is_on_network() const override { return true; }
  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override;

 private:
  class ProbeSink;
  class RangeSink;

  void probe(std::string* commit);
  void read_range(std::uint64_t begin, std::uint64_t end,
                  std::span<const std::span<std::byte>> pieces);
  void read_small(std::uint64_t begin, std::uint64_t end,
                  std::span<const std::span<std::byte>> pieces);
  [[nodiscard]] HttpResult follow(const std::string& range, BodySink& sink);
  [[nodiscard]] HttpResult ask(const std::string& range, BodySink& sink, bool& was_cached);
  [[nodiscard]] std::string redirect(const std::string& from, const std::string& location) const;
  void take_linked(const std::string& etag);
  void require_same(const HttpResponse& response) const;
  [[noreturn]] void refuse(const HttpResult& result, std::uint64_t offset) const;
  [[noreturn]] void refuse_range(const HttpResponse& response, std::uint64_t begin,
                                 std::uint64_t end) const;
  [[noreturn]] void fail(const char* code, std::string message, std::string found = {},
                         std::string expected = {}, std::optional<std::uint64_t> offset = {}) const;

  const std::shared_ptr<HttpClient> client_;
  const Address address_;
  FileIdentity identity_;     // from the first response, like the next members; then constant
  std::string seen_version_;  // from the host that serves the bytes; may differ from the hub's
  std::string linked_etag_;   // from the hub
  bool is_known_ = false;
  bool begins_private_ = true;  // the caller's address is private

  mutable std::mutex mutex_;
  std::string redirected_;  // URL that serves the bytes; mutex_ guards it and all that follows
  std::uint64_t block_bytes_ = 0;
};

}  // namespace loadstone
