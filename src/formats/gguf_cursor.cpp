#include "formats/gguf_cursor.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/checked.h"
#include "base/text.h"
#include "formats/gguf.h"

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
  if (into.size() > remaining()) cursor_.file_ends(into.size());
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

// Called only when the buffer is used up, so that the digest gets each byte once.
void HeaderReader::refill(std::size_t needed_bytes) {
  const std::uint64_t known = ahead_ > remaining() ? remaining() : needed_bytes + ahead_;
  const std::uint64_t wanted = std::min({known, remaining(), std::uint64_t{buffer_bytes_max}});
  buffer_.resize(wanted);
  position_ = 0;
  source_.read(offset_, buffer_);
}

void GgufCursor::refuse(HeaderProblem problem) const {
  problem.byte_offset = at;
  loadstone::refuse(source.path(), std::move(problem), culprit);
}

void GgufCursor::file_ends(std::uint64_t wanted_bytes) const {
  refuse({"gg.truncated", fmt::format("the file ends inside {}", reading), field,
          "a file of " + bytes_text(reader.file_bytes()),
          fmt::format("{} more at byte {}", bytes_text(wanted_bytes), reader.offset())});
}

std::uint64_t GgufCursor::length(std::string_view what, const char* code,
                                 std::uint64_t each_bytes) {
  const auto length = number<std::uint64_t>();
  const auto bytes = checked_mul(length, each_bytes);
  const std::uint64_t bytes_max = std::min(reader.file_bytes(), gguf_item_bytes_max);
  if (!bytes || *bytes > bytes_max) {
    refuse({code, "the declared length exceeds the file or the largest plausible header", what,
            std::to_string(length),
            fmt::format("at most {} of {} each", bytes_max / each_bytes, bytes_text(each_bytes))});
  }
  if (*bytes > reader.remaining()) file_ends(*bytes);
  return length;
}

std::string printable_bytes(std::string_view text) {
  if (is_utf8(text)) return printable(text);
  std::string out;
  for (const char each : text.substr(0, 64)) {
    const auto byte = static_cast<unsigned char>(each);
    out += byte < 0x80 ? std::string(1, each) : fmt::format("\\x{:02x}", byte);
  }
  return printable(out);
}

}  // namespace loadstone
