// Computes digests of single blocks and of trees over blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "loadstone/receipt.h"

namespace loadstone {

inline constexpr std::uint64_t receipt_block_bytes = 1u << 20;

// A digest: the kind's bytes, followed by zeros.
using BlockDigest = std::array<std::byte, 32>;

// Hashes consecutive bytes. Not thread-safe.
class BlockHash {
 public:
  virtual ~BlockHash() = default;
  virtual void update(std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual BlockDigest finish() = 0;
};

// Data that a digest covers. Blocks of data and trees over blocks are hashed with different tags.
// For a whole file the digest is the plain one that other programs publish.
enum class HashOf : std::uint8_t { block, tree, file };

// Creates a hash. Throws Error "receipt.digest" if this build lacks the kind, or "memory.host".
[[nodiscard]] std::unique_ptr<BlockHash> make_hash(DigestKind kind, HashOf what);
[[nodiscard]] BlockDigest hash_block(DigestKind kind, std::span<const std::byte> bytes);
// Returns the hexadecimal digest of the blocks of all ranges, in order.
[[nodiscard]] std::string tree_digest(DigestKind kind, std::span<const ByteRange> ranges,
                                      std::span<const BlockDigest> blocks);

// Defined in sha256.cpp, or in sha256_absent.cpp for builds without OpenSSL.
[[nodiscard]] std::unique_ptr<BlockHash> make_sha256(HashOf what);
[[nodiscard]] bool has_sha256() noexcept;
// Creates the SHA-1 that git computes for a file of this size. The digest has 20 bytes.
[[nodiscard]] std::unique_ptr<BlockHash> make_git_hash(std::uint64_t bytes);
[[nodiscard]] std::string hexadecimal(std::span<const std::byte> digest);

}  // namespace loadstone
