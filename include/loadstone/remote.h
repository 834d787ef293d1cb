// Reads checkpoints on other machines: https:// and http:// URLs, files of a model hub
// (hf://org/name@revision/file) and of an object store (s3://bucket/key).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "loadstone/export.h"
#include "loadstone/storage.h"

namespace loadstone {

// Returns true if the text of the path names a remote file. Does not contact a server.
[[nodiscard]] LOADSTONE_API bool is_remote(std::string_view path) noexcept;
// Returns false if loadstone was built without libcurl; remote paths then throw Error "io.remote".
[[nodiscard]] LOADSTONE_API bool can_read_remote() noexcept;

// A request that failed and is about to be repeated.
struct RemoteRetry {
  std::string path;    // the URL, without secrets
  std::string reason;  // such as "status 503"
  std::chrono::milliseconds wait;
};

// Options for remote files. loadstone reads no environment variables; the caller may set options
// from them.
struct RemoteOptions {
  std::string proxy = {};     // URL of an HTTP or SOCKS proxy; empty: none
  std::string no_proxy = {};  // comma-separated hosts to reach without the proxy
  std::string ca_file = {};   // PEM file of trusted authorities; empty: the system's
  // The model hub. loadstone sends the token only to this endpoint, never to a redirect's target.
  std::string hub_endpoint = "https://huggingface.co";
  std::string hub_token = {};
  // The object store. loadstone does not sign requests without a key.
  std::string s3_endpoint = {};  // empty: the endpoint of AWS for the region
  std::string s3_region = "us-east-1";
  std::string s3_access_key = {};
  std::string s3_secret_key = {};
  std::string s3_session_token = {};

  unsigned reads_at_once = 16;        // default number of connections of a load or conversion
  unsigned attempts_max = 6;          // consecutive attempts that receive no bytes
  std::uint32_t first_wait_ms = 250;  // before the second attempt; doubles for each further one
  std::uint32_t stall_seconds = 30;   // time below 1 KiB/s after which a connection counts as lost

  // Each thread that waits for a remote machine calls this several times a second. If it returns
  // true or throws, the request ends with Error "cancelled" within a second. Must be thread-safe.
  std::function<bool()> is_stopped = {};
  // Called before each repeated request. Must be thread-safe, and must not throw.
  std::function<void(const RemoteRetry&)> on_retry = {};
};

// Returns a storage that reads URLs itself and all other paths through local_storage(), which also
// receives writes, so one storage serves remote and local checkpoints. It contacts only hosts that
// a path names, and hosts that these redirect to. Thread-safe.
//
// The storage keeps the query of a URL (a signature) and sends it with requests for that file;
// paths in catalogs, plans and errors omit it.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Storage> make_remote_storage(RemoteOptions options);

// Wraps `storage` for one task, whose reads of remote files end when `is_stopped` returns true, see
// RemoteOptions::is_stopped. `storage` must outlive the result.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Storage> make_stoppable(
    Storage& storage, std::function<bool()> is_stopped);

}  // namespace loadstone
