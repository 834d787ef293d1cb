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

// Whether the path names a file of another machine: text alone decides.
[[nodiscard]] LOADSTONE_API bool is_remote(std::string_view path) noexcept;
// False where loadstone was built without libcurl: such paths are then Error "io.remote".
[[nodiscard]] LOADSTONE_API bool can_read_remote() noexcept;

// Nothing of it is read from the environment: that is the caller's business.
struct RemoteOptions {
  std::string proxy = {};     // URL of an HTTP or SOCKS proxy; empty: none
  std::string no_proxy = {};  // hosts that are reached without it, by commas
  std::string ca_file = {};   // PEM file of trusted authorities; empty: the system's
  // Of the model hub. The token goes to this endpoint only, and never to where it redirects.
  std::string hub_endpoint = "https://huggingface.co";
  std::string hub_token = {};
  // Of the object store. Without a key requests are not signed.
  std::string s3_endpoint = {};  // empty: that of AWS for the region
  std::string s3_region = "us-east-1";
  std::string s3_access_key = {};
  std::string s3_secret_key = {};
  std::string s3_session_token = {};

  unsigned reads_at_once = 16;        // connections that a load or conversion uses by default
  unsigned attempts_max = 6;          // without a byte of progress between them
  std::uint32_t first_wait_ms = 250;  // before the second attempt; doubled for each further one
  std::uint32_t stall_seconds = 30;   // of less than 1 KiB/s, then a connection is lost

  // Asked several times a second by each thread that waits for another machine: true ends its
  // request with Error "cancelled" within a second. Thread-safe. An exception from it ends it too.
  std::function<bool()> is_stopped = {};
};

// Reads URLs, and everything else through local_storage(), where it writes too; so one storage
// serves checkpoints of both kinds. Contacts a host only for a path that names it, and where that
// host redirects to. Thread-safe.
//
// A query of a URL (a signature) is kept here and sent with requests for that file; paths of
// catalogs, plans and errors do not have it.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Storage> make_remote_storage(RemoteOptions options);

// `storage` for one piece of work: reads of files of other machines end as by
// RemoteOptions::is_stopped, which `is_stopped` is like. `storage` must outlive it.
[[nodiscard]] LOADSTONE_API std::unique_ptr<Storage> make_stoppable(
    Storage& storage, std::function<bool()> is_stopped);

}  // namespace loadstone
