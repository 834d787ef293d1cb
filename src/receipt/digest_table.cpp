#include "receipt/digest_table.h"

#include <algorithm>
#include <utility>

#include "base/ceil_div.h"
#include "loadstone/error.h"

namespace loadstone {

// A block of an item: its index among all blocks of the item, and its byte range.
struct DigestTable::Block {
  std::uint64_t index = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// A block of which only some bytes have arrived.
struct DigestTable::OpenBlock {
  std::mutex mutex;                 // guards all members below; lock the item's mutex first
  std::unique_ptr<BlockHash> hash;  // hash of all bytes before `at`
  std::uint64_t at = 0;
  // Byte ranges that arrived early, by start offset.
  std::map<std::uint64_t, std::vector<std::byte>> waiting;
  bool is_given_up = false;
};

struct DigestTable::Item {
  std::vector<ByteRange> ranges;
  std::vector<std::uint64_t> first_blocks;  // by range
  std::uint64_t block_count = 0;
  std::string digest;  // set when all blocks have digests
  std::mutex mutex;
  // `mutex` guards all members below.
  std::uint64_t bytes_left = 0;
  // Empty before the first block arrives and after the digest is made.
  std::vector<BlockDigest> blocks;
  std::vector<bool> is_there;
  std::map<std::uint64_t, std::shared_ptr<OpenBlock>> open;
};

DigestTable::DigestTable(DigestKind kind, std::uint64_t waiting_bytes_max)
    : kind_(kind), waiting_bytes_max_(waiting_bytes_max) {
  static_cast<void>(make_hash(kind, HashOf::tree));
}

DigestTable::~DigestTable() = default;

std::uint32_t DigestTable::add(std::vector<ByteRange> ranges) {
  auto item = std::make_unique<Item>();
  std::erase_if(ranges, [](const ByteRange& range) { return range.size() == 0; });
  for (const ByteRange& range : ranges) {
    item->first_blocks.push_back(item->block_count);
    item->block_count += ceil_div(range.size(), receipt_block_bytes);
    item->bytes_left += range.size();
  }
  item->ranges = std::move(ranges);
  if (item->block_count == 0) item->digest = tree_digest(kind_, item->ranges, {});
  items_.push_back(std::move(item));
  return static_cast<std::uint32_t>(items_.size() - 1);
}

// Calls `visit` with each block that has bytes in [begin, end), until `visit` returns false.
template <typename Visit>
bool DigestTable::visit_blocks(const Item& item, std::uint64_t begin, std::uint64_t end,
                               const Visit& visit) {
  auto range = std::ranges::upper_bound(item.ranges, begin, {}, &ByteRange::end);
  for (; range != item.ranges.end() && range->begin < end; ++range) {
    const std::uint64_t skipped =
        (std::max(begin, range->begin) - range->begin) / receipt_block_bytes;
    Block block = {
        .index = item.first_blocks[static_cast<std::size_t>(range - item.ranges.begin())] + skipped,
        .begin = range->begin + skipped * receipt_block_bytes};
    for (; block.begin < std::min(end, range->end); block.begin = block.end, ++block.index) {
      block.end = std::min(block.begin + receipt_block_bytes, range->end);
      if (!visit(block)) return false;
    }
  }
  return true;
}

void DigestTable::update(std::uint32_t number, std::uint64_t begin,
                         std::span<const std::byte> bytes) {
  Item& item = *items_[number];
  const std::uint64_t end = begin + bytes.size();
  visit_blocks(item, begin, end, [&](const Block& block) {
    const std::uint64_t first = std::max(begin, block.begin);
    const std::uint64_t last = std::min(end, block.end);
    update_block(item, block, first, bytes.subspan(first - begin, last - first));
    return true;
  });
}

void DigestTable::update_block(Item& item, const Block& block, std::uint64_t begin,
                               std::span<const std::byte> bytes) {
  std::unique_lock lock(item.mutex);
  if (item.bytes_left == 0) return;
  if (!item.is_there.empty() && item.is_there[block.index]) return;
  if (bytes.size() == block.end - block.begin) {
    lock.unlock();
    const BlockDigest digest = hash_block(kind_, bytes);
    lock.lock();
    store(item, block, digest);
    return;
  }
  const auto known = item.open.find(block.index);
  const auto open = known != item.open.end() ? known->second : std::make_shared<OpenBlock>();
  if (known == item.open.end()) {
    item.open.emplace(block.index, open);
    open->at = block.begin;
    open->is_given_up = ++open_blocks_ > open_blocks_max;
  }
  lock.unlock();
  if (const auto digest = append(*open, block, begin, bytes)) {
    lock.lock();
    store(item, block, *digest);
  }
}

std::optional<BlockDigest> DigestTable::append(OpenBlock& open, const Block& block,
                                               std::uint64_t begin,
                                               std::span<const std::byte> bytes) {
  const std::lock_guard lock(open.mutex);
  if (open.is_given_up) return std::nullopt;
  if (begin > open.at) {
    const auto known = open.waiting.find(begin);
    if (known != open.waiting.end() && known->second.size() >= bytes.size()) return {};
    if ((waiting_bytes_ += bytes.size()) > waiting_bytes_max_) {
      waiting_bytes_ -= bytes.size();
      give_up(open);
      return std::nullopt;
    }
    auto& copy = open.waiting[begin];
    waiting_bytes_ -= copy.size();
    copy.assign(bytes.begin(), bytes.end());
    return std::nullopt;
  }
  const auto take = [&](std::uint64_t from, std::span<const std::byte> part) {
    const std::uint64_t end = from + part.size();
    if (end <= open.at) return;
    if (!open.hash) open.hash = make_hash(kind_, HashOf::block);
    open.hash->update(part.subspan(open.at - from));
    open.at = end;
  };
  take(begin, bytes);
  while (!open.waiting.empty() && open.waiting.begin()->first <= open.at) {
    const auto first = open.waiting.begin();
    take(first->first, first->second);
    waiting_bytes_ -= first->second.size();
    open.waiting.erase(first);
  }
  if (open.at != block.end) return std::nullopt;
  open.is_given_up = true;  // update() ignores further bytes
  return open.hash->finish();
}

void DigestTable::give_up(OpenBlock& open) {
  for (const auto& [begin, bytes] : open.waiting) waiting_bytes_ -= bytes.size();
  open.waiting.clear();
  open.hash.reset();
  open.is_given_up = true;
}

void DigestTable::store(Item& item, const Block& block, const BlockDigest& digest) {
  if (item.bytes_left == 0) return;
  if (item.is_there.empty()) {
    item.is_there.assign(item.block_count, false);
    item.blocks.resize(item.block_count);
  }
  if (const auto open = item.open.find(block.index); open != item.open.end()) {
    {
      const std::lock_guard lock(open->second->mutex);
      give_up(*open->second);
    }
    item.open.erase(open);
    --open_blocks_;
  }
  if (item.is_there[block.index]) return;
  item.is_there[block.index] = true;
  item.blocks[block.index] = digest;
  item.bytes_left -= block.end - block.begin;
  if (item.bytes_left > 0) return;
  item.digest = tree_digest(kind_, item.ranges, item.blocks);
  item.blocks = {};
  item.is_there = {};
}

bool DigestTable::complete(std::uint32_t number, const Read& read, const GoesOn& goes_on) {
  Item& item = *items_[number];
  std::vector<std::byte> buffer;
  return visit_blocks(item, 0, UINT64_MAX, [&](const Block& block) {
    std::unique_lock lock(item.mutex);
    if (item.bytes_left == 0 || (!item.is_there.empty() && item.is_there[block.index])) return true;
    lock.unlock();
    buffer.resize(block.end - block.begin);
    read(block.begin, buffer);
    bytes_read_again_ += buffer.size();
    const BlockDigest digest = hash_block(kind_, buffer);
    lock.lock();
    store(item, block, digest);
    lock.unlock();
    return !goes_on || goes_on(buffer.size());
  });
}

std::uint64_t DigestTable::bytes_left(std::uint32_t item) const { return items_[item]->bytes_left; }

const std::string& DigestTable::digest(std::uint32_t item) const {
  const std::string& digest = items_[item]->digest;
  if (digest.empty())
    throw Error("internal", "a digest was requested before all its bytes were read");
  return digest;
}

}  // namespace loadstone
