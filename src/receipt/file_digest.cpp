#include "receipt/file_digest.h"

#include <algorithm>
#include <vector>

#include "receipt/block_hash.h"

namespace loadstone {

std::string file_digest(DigestKind kind, ByteSource& file, std::uint64_t begin,
                        std::span<const ByteRange> ranges,
                        const std::function<bool(std::uint64_t)>& goes_on) {
  std::vector<BlockDigest> blocks;
  std::vector<std::byte> buffer;
  for (const ByteRange& range : ranges) {
    for (std::uint64_t at = range.begin; at < range.end; at += receipt_block_bytes) {
      buffer.resize(std::min(receipt_block_bytes, range.end - at));
      file.read(begin + at, buffer);
      blocks.push_back(hash_block(kind, buffer));
      if (goes_on && !goes_on(buffer.size())) return {};
    }
  }
  return tree_digest(kind, ranges, blocks);
}

std::vector<ByteRange> ranges_of(const ReceiptTensor& tensor) {
  if (!tensor.ranges.empty() || tensor.begin == tensor.end) return tensor.ranges;
  return {{0, tensor.byte_count()}};
}

}  // namespace loadstone
