// Replaces sha256.cpp in builds without OpenSSL.
#include "loadstone/error.h"
#include "receipt/block_hash.h"

namespace loadstone {

std::unique_ptr<BlockHash> make_sha256(HashOf /*what*/) {
  throw Error("receipt.digest",
              "this loadstone was built without OpenSSL and has no sha256-tree; use xxh3-128");
}

std::unique_ptr<BlockHash> make_git_hash(std::uint64_t /*bytes*/) {
  throw Error("receipt.digest", "this loadstone was built without OpenSSL and has no SHA-1");
}

bool has_sha256() noexcept { return false; }

}  // namespace loadstone
