// Computes digests of many lists of byte ranges. Their bytes may arrive in any order and from any
// thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "receipt/block_hash.h"

namespace loadstone {

// Callback that gets the number of bytes of each read. If it returns false, the work ends early.
using GoesOn = std::function<bool(std::uint64_t bytes)>;

// Digests of items, which are lists of byte ranges. A block that arrives in one update is hashed at
// once, without a lock. Parts of a block are hashed in order, under the block's lock; a part that
// arrives early is copied until its turn. Copies take at most `waiting_bytes_max`; beyond that,
// blocks are given up, and complete() reads them again. Repeated bytes are hashed once. update() is
// thread-safe; call add() before it.
class DigestTable {
 public:
  static constexpr std::uint64_t waiting_bytes_default = 8u << 20;
  static constexpr std::size_t open_blocks_max = 1024;  // each takes half a KiB

  // Callback that reads bytes [begin, begin + to.size()) of the item.
  using Read = std::function<void(std::uint64_t begin, std::span<std::byte> to)>;

  // Throws Error "receipt.digest" if this build lacks the kind.
  explicit DigestTable(DigestKind kind, std::uint64_t waiting_bytes_max = waiting_bytes_default);
  DigestTable(const DigestTable&) = delete;
  DigestTable& operator=(const DigestTable&) = delete;
  ~DigestTable();

  // Adds an item. The ranges must be in ascending order and must not touch; empty ranges are
  // ignored. Returns the item's index.
  std::uint32_t add(std::vector<ByteRange> ranges);
  // Hashes bytes of the item that start at offset `begin`. Ignores bytes outside of the item's
  // ranges.
  void update(std::uint32_t item, std::uint64_t begin, std::span<const std::byte> bytes);
  // Reads the missing bytes: bytes_left() bytes in all. Call once per item. Returns false if
  // `goes_on` ended it early.
  bool complete(std::uint32_t item, const Read& read, const GoesOn& goes_on = {});
  [[nodiscard]] std::uint64_t bytes_left(std::uint32_t item) const;
  // Returns the digest of a complete item. Throws Error "internal" for an incomplete item.
  [[nodiscard]] const std::string& digest(std::uint32_t item) const;

  [[nodiscard]] DigestKind kind() const noexcept { return kind_; }
  // Number of bytes that complete() had to read again.
  [[nodiscard]] std::uint64_t bytes_read_again() const noexcept { return bytes_read_again_; }

 private:
  struct OpenBlock;
  struct Item;
  struct Block;

  template <typename Visit>
  bool visit_blocks(const Item& item, std::uint64_t begin, std::uint64_t end, const Visit& visit);
  void update_block(Item& item, const Block& block, std::uint64_t begin,
                    std::span<const std::byte> bytes);
  // Hashes bytes of the block. Returns the block's digest once all its bytes have arrived.
  [[nodiscard]] std::optional<BlockDigest> append(OpenBlock& open, const Block& block,
                                                  std::uint64_t begin,
                                                  std::span<const std::byte> bytes);
  void give_up(OpenBlock& open);
  void store(Item& item, const Block& block, const BlockDigest& digest);

  const DigestKind kind_;
  const std::uint64_t waiting_bytes_max_;
  std::vector<std::unique_ptr<Item>> items_;
  std::atomic<std::uint64_t> waiting_bytes_ = 0;
  std::atomic<std::size_t> open_blocks_ = 0;
  std::atomic<std::uint64_t> bytes_read_again_ = 0;
};

}  // namespace loadstone
