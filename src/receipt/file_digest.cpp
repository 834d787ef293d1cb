#include "receipt/file_digest.h"

#include "base/only_errors.h"

namespace loadstone {

std::string file_digest(DigestKind kind, ByteSource& file, std::uint64_t begin,
                        const std::vector<ByteRange>& ranges, const GoesOn& goes_on) {
  DigestTable table(kind);
  const std::uint32_t item = table.add(ranges);
  const auto read = [&](std::uint64_t at, std::span<std::byte> to) { file.read(begin + at, to); };
  return table.complete(item, read, goes_on) ? table.digest(item) : std::string();
}

std::string digest_of(DigestKind kind, std::span<const std::byte> bytes) {
  return only_errors([&] {
    DigestTable table(kind);
    const std::uint32_t item = table.add({{0, bytes.size()}});
    table.update(item, 0, bytes);
    return table.digest(item);
  });
}

std::vector<ByteRange> ranges_of(const ReceiptTensor& tensor) {
  if (!tensor.ranges.empty() || tensor.begin == tensor.end) return tensor.ranges;
  return {{0, tensor.byte_count()}};
}

}  // namespace loadstone
