// Digests of single blocks and of the trees over them.
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

// The kind's digest bytes, followed by zeros.
using BlockDigest = std::array<std::byte, 32>;

// Hashes consecutive bytes. Not thread-safe.
class BlockHash {
 public:
  virtual ~BlockHash() = default;
  virtual void update(std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual BlockDigest finish() = 0;
};

// A digest covers a block of data, or a list of blocks, with different tags. For a whole file it is
// the plain digest that others publish.
enum class HashOf : std::uint8_t { block, tree, file };

// Throws Error "receipt.digest" if the kind is not built in, or "memory.host".
[[nodiscard]] std::unique_ptr<BlockHash> make_hash(DigestKind kind, HashOf what);
[[nodiscard]] BlockDigest hash_block(DigestKind kind, std::span<const std::byte> bytes);
// Hexadecimal digest of all blocks of the ranges, in their order.
[[nodiscard]] std::string tree_digest(DigestKind kind, std::span<const ByteRange> ranges,
                                      std::span<const BlockDigest> blocks);

// Defined in sha256.cpp, or in sha256_absent.cpp for builds without OpenSSL.
[[nodiscard]] std::unique_ptr<BlockHash> make_sha256(HashOf what);
[[nodiscard]] bool has_sha256() noexcept;
// Computes git's SHA-1 of a file of this size; the digest has 20 bytes.
[[nodiscard]] std::unique_ptr<BlockHash> make_git_hash(std::uint64_t bytes);
[[nodiscard]] std::string hexadecimal(std::span<const std::byte> digest);

}  // namespace loadstone
