// Checkpoints on other machines: https:// and http:// URLs, files of a model hub
// (hf://org/name@revision/file) and of an object store (s3://bucket/key).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "loadstone/export.h"
#include "loadstone/storage.h"

namespace loadstone {

// Returns true if the path names a remote file, by its text alone.
[[nodiscard]] LOADSTONE_API bool is_remote(std::string_view path) noexcept;
// Returns false if loadstone was built without libcurl; such paths are then Error "io.remote".
[[nodiscard]] LOADSTONE_API bool can_read_remote() noexcept;

// Nothing is read from the environment; that is the caller's task.
struct RemoteOptions {
  std::string proxy = {};     // URL of an HTTP or SOCKS proxy; empty: none
  std::string no_proxy = {};  // comma-separated hosts to reach without it
  std::string ca_file = {};   // PEM file of trusted authorities; empty: the system's
  // The model hub. The token goes to this endpoint only, never to a redirect's target.
  std::string hub_endpoint = "https://huggingface.co";
  std::string hub_token = {};
  // The object store. Requests without a key are not signed.
  std::string s3_endpoint = {};  // empty: that of AWS for the region
  std::string s3_region = "us-east-1";
  std::string s3_access_key = {};
  std::string s3_secret_key = {};
  std::string s3_session_token = {};

  unsigned reads_at_once = 16;        // connections of a load or conversion, by default
  unsigned attempts_max = 6;          // without progress between them
  std::uint32_t first_wait_ms = 250;  // before the second attempt; doubles for each further one
  std::uint32_t stall_seconds = 30;   // below 1 KiB/s, before a connection counts as lost

  // Called several times a second by each thread that waits for a remote machine: true ends its
  // request with Error "cancelled" within a second, and so does an exception. Thread-safe.
  std::function<bool()> is_stopped = {};
};

// Reads URLs, and all other paths through local_storage(), which also receives writes, so one
// storage serves checkpoints of both kinds. Contacts only hosts that a path names, and hosts that
// these redirect to. Thread-safe.
//
// The query of a URL (a signature) is kept here and sent with requests for that file; paths in
// catalogs, plans and errors omit it.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Storage> make_remote_storage(RemoteOptions options);

// Wraps `storage` for one task: `is_stopped`, like RemoteOptions::is_stopped, ends reads of remote
// files. `storage` must outlive it.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Storage> make_stoppable(
    Storage& storage, std::function<bool()> is_stopped);

}  // namespace loadstone
