#include "engine/read_ahead.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "base/ceil_div.h"
#include "storage/forwarding.h"

namespace loadstone {

namespace {

// Bytes per read-ahead request to the system.
constexpr std::uint64_t step_bytes = std::uint64_t{4} << 20;
// Maximum distance, because each read checks all steps within the distance.
constexpr std::uint64_t bytes_ahead_max = std::uint64_t{1} << 30;

}  // namespace

class ReadAhead::Source final : public ForwardingSource {
 public:
  Source(ReadAhead& ahead, std::uint32_t shard)
      : ForwardingSource(ahead.shards_[shard]), ahead_(ahead), shard_(shard) {}

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    std::uint64_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.size();
    ahead_.reach(shard_, {offset, offset + bytes});
    ForwardingSource::read(offset, pieces);
  }

 private:
  ReadAhead& ahead_;
  std::uint32_t shard_;
};

ReadAhead::ReadAhead(std::vector<ShardRange> reads,
                     std::span<const std::shared_ptr<ByteSource>> shards, std::uint64_t bytes_ahead)
    : reads_(std::move(reads)),
      shards_(shards.begin(), shards.end()),
      sources_(shards_),
      bytes_ahead_(std::min(bytes_ahead, bytes_ahead_max)) {
  if (bytes_ahead_ == 0) return;
  ends_.reserve(reads_.size());
  std::uint64_t end = 0;
  for (const ShardRange& range : reads_) ends_.push_back(end += range.bytes.size());
  asked_ = std::vector<std::atomic<bool>>(ceil_div(end, step_bytes));
  for (std::uint32_t i = 0; i < shards_.size(); ++i) {
    if (shards_[i]) sources_[i] = std::make_shared<Source>(*this, i);
  }
}

// Returns the number of planned bytes before this offset of the shard.
std::uint64_t ReadAhead::position(std::uint32_t shard, std::uint64_t offset) const noexcept {
  const auto after = std::ranges::upper_bound(
      reads_, std::tuple(shard, offset), {},
      [](const ShardRange& range) { return std::tuple(range.shard, range.bytes.begin); });
  if (after == reads_.begin()) return 0;
  const auto index = static_cast<std::size_t>(after - reads_.begin()) - 1;
  const ShardRange& range = reads_[index];
  if (range.shard != shard || offset >= range.bytes.end) return ends_[index];
  return ends_[index] - (range.bytes.end - offset);
}

void ReadAhead::reach(std::uint32_t shard, ByteRange bytes) noexcept {
  if (asked_.empty()) return;
  const std::uint64_t begin = position(shard, bytes.begin);
  const std::uint64_t end = std::min(position(shard, bytes.end) + bytes_ahead_, ends_.back());
  for (std::uint64_t step = begin / step_bytes; step * step_bytes < end; ++step) {
    // The first thread requests each step, because readers keep file order only approximately.
    if (asked_[step].load(std::memory_order_relaxed) || asked_[step].exchange(true)) continue;
    ask(step * step_bytes, std::min((step + 1) * step_bytes, ends_.back()));
  }
}

void ReadAhead::ask(std::uint64_t begin, std::uint64_t end) noexcept {
  auto index = static_cast<std::size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
  for (; begin < end; ++index) {
    const ShardRange& range = reads_[index];
    const std::uint64_t last = std::min(end, ends_[index]);
    const std::uint64_t offset = range.bytes.end - (ends_[index] - begin);
    if (ByteSource* const source = shards_[range.shard].get()) {
      bytes_asked_ += source->prefetch(offset, last - begin);
    }
    begin = last;
  }
}

}  // namespace loadstone
