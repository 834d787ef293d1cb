#include "formats/header_reader.h"

#include <algorithm>

namespace loadstone {

std::string HeaderReader::text(std::uint64_t length) {
  std::string text(length, '\0');
  take(std::as_writable_bytes(std::span(text)));
  return text;
}

std::vector<std::byte> HeaderReader::bytes(std::uint64_t length) {
  std::vector<std::byte> bytes(length);
  take(bytes);
  return bytes;
}

void HeaderReader::skip_to(std::uint64_t offset) {
  std::vector<std::byte> passed;
  const std::uint64_t end = std::min(offset, file_bytes_);
  while (offset_ < end) {
    passed.resize(std::min<std::uint64_t>(end - offset_, buffer_bytes_max));
    take(passed);
  }
}

void HeaderReader::take(std::span<std::byte> into) {
  if (into.size() > remaining()) at_end_->file_ends(into.size());
  while (!into.empty()) {
    if (position_ == buffer_.size()) refill(into.size());
    const std::size_t count = std::min(into.size(), buffer_.size() - position_);
    const auto piece = std::span(buffer_).subspan(position_, count);
    std::ranges::copy(piece, into.begin());
    position_ += count;
    offset_ += count;
    into = into.subspan(count);
    if (position_ == buffer_.size()) digest_.update(buffer_);
  }
}

// Only when the buffer is used up, so that the digest sees each byte once.
void HeaderReader::refill(std::size_t needed_bytes) {
  const std::uint64_t known = ahead_ > remaining() ? remaining() : needed_bytes + ahead_;
  const std::uint64_t wanted = std::min({known, remaining(), std::uint64_t{buffer_bytes_max}});
  buffer_.resize(wanted);
  position_ = 0;
  source_.read(offset_, buffer_);
}

}  // namespace loadstone
