#include "storage/read_batch.h"

#include <algorithm>
#include <climits>
#include <cstring>

namespace loadstone {

namespace {

// One system call reads at most 2^31 - 4096 bytes.
constexpr std::size_t batch_bytes_max = std::size_t{1} << 30;
// Limit of a batch with bytes to move, because they should still be in the core's cache when moved.
constexpr std::size_t moved_batch_bytes_max = 256 << 10;
// Shorter pieces are not moved, because each additional part costs time in the kernel.
constexpr std::size_t moved_bytes_min = 4096;

std::size_t shift_to_line(const std::byte* to, std::uint64_t offset, std::size_t line) noexcept {
  return static_cast<std::size_t>(offset - reinterpret_cast<std::uintptr_t>(to)) % line;
}

}  // namespace

void ReadPlace::advance(ReadPieces pieces, std::size_t bytes) noexcept {
  while (bytes > 0) {
    const std::size_t rest = pieces[piece].size() - done;
    if (bytes < rest) {
      done += bytes;
      return;
    }
    bytes -= rest;
    done = 0;
    ++piece;
  }
}

void ReadBatch::gather(ReadPieces pieces, ReadPlace place, std::uint64_t offset,
                       bool moves) noexcept {
  static_assert(parts_max <= IOV_MAX);
  part_count_ = moved_count_ = bytes_ = 0;
  for (; place.piece < pieces.size() && part_count_ + 2 <= parts_max; ++place.piece) {
    const auto rest = pieces[place.piece].subspan(place.done);
    place.done = 0;
    if (rest.empty()) continue;
    std::size_t shift = 0;
    if (moves && rest.size() >= moved_bytes_min) {
      shift = shift_to_line(rest.data(), offset + bytes_, line_bytes);
    }
    const bool is_short = shift > 0 || moved_count_ > 0;
    const std::size_t most = is_short ? moved_batch_bytes_max : batch_bytes_max;
    if (bytes_ >= most) return;
    const std::size_t bytes = std::min(rest.size(), most - bytes_);
    if (bytes < moved_bytes_min) shift = 0;
    if (shift == 0) {
      append(rest.data(), bytes);
    } else {
      append(rest.data() + shift, bytes - shift);
      append(ends_[moved_count_].data(), shift);
      moved_[moved_count_++] = {rest.data(), bytes, shift};
    }
    bytes_ += bytes;
    if (bytes < rest.size()) return;
  }
}

void ReadBatch::settle() const noexcept {
  for (std::size_t i = 0; i < moved_count_; ++i) {
    const auto [to, bytes, shift] = moved_[i];
    std::memmove(to, to + shift, bytes - shift);
    std::memcpy(to + (bytes - shift), ends_[i].data(), shift);
  }
}

}  // namespace loadstone
