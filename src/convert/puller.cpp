#include "convert/puller.h"

#include <algorithm>
#include <span>

namespace loadstone {

Puller::Puller(Work& work)
    : work_(work),
      reader_(work.conversion.plan.catalog, work.sources, work.conversion.staging_bytes, work.stop),
      buffer_(work.conversion.window_bytes) {}

void Puller::run() {
  Window window;
  while (!work_.stop && work_.queue.next(window)) {
    write(window);
    if (work_.stop) break;
    work_.bytes_done += window.byte_count;
    if (work_.queue.finish(window)) work_.output.finish(window.file);
  }
  work_.bytes_read += reader_.bytes_read();
  work_.staging_bytes += reader_.staging_bytes_peak() + window_bytes_peak_;
}

void Puller::write(const Window& window) {
  if (window.byte_count == 0) return;
  const PlannedTarget& target = work_.conversion.plan.targets[window.target];
  std::span<const std::byte> bytes;
  if (const Constant& constant = target.recipe.constant) {
    const std::uint64_t begin = Encoding(target.dtype).byte_count(window.begin).value_or(0);
    bytes = std::span(*constant).subspan(begin, window.byte_count);
  } else {
    if (open_ != window.target) {
      reader_.open({.name = target.name,
                    .boxes = target.recipe.boxes,
                    .decodings = work_.conversion.plan.decodings,
                    .shape = target.shape,
                    .dtype = target.dtype});
      open_ = window.target;
    }
    const std::span<std::byte> piece = {buffer_.data(), window.byte_count};
    reader_.read(window.begin, window.end, piece);
    window_bytes_peak_ = std::max(window_bytes_peak_, window.byte_count);
    bytes = piece;
  }
  if (!work_.stop) work_.output.write(window.file, window.file_offset, bytes);
}

}  // namespace loadstone
