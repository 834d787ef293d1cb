#include "formats/pickle_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "formats/file_header.h"
#include "formats/torch_pickle.h"

namespace loadstone {

std::optional<std::int64_t> long_number(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return 0;
  const auto is_negative = [&] { return (bytes.back() & std::byte{0x80}) != std::byte{0}; };
  const bool negative = is_negative();
  const std::byte sign = negative ? std::byte{0xff} : std::byte{0};
  // Bytes that only repeat the sign are redundant.
  while (bytes.size() > 8 && bytes.back() == sign) bytes = bytes.first(bytes.size() - 1);
  if (bytes.size() > 8 || is_negative() != negative) return std::nullopt;
  std::uint64_t value = negative ? UINT64_MAX : 0;
  std::memcpy(&value, bytes.data(), bytes.size());
  return static_cast<std::int64_t>(value);
}

unsigned char PickleInput::next_opcode() {
  op_begin_ = position();
  op_ = '.';  // If the pickle ends between opcodes, the error names STOP.
  op_ = number<unsigned char>();
  return op_;
}

std::span<const std::byte> PickleInput::take(std::uint64_t count) {
  if (count > remaining()) {
    refuse("pt.truncated", "the pickle ends too early",
           fmt::format("{} of {}", bytes_text(remaining()), bytes_text(count)), "all of them");
  }
  if (count > have_ - taken_) {
    if (consumed() + count > pickle_bytes_max) {
      refuse("pt.pickle_too_large", "the pickle is larger than that of any checkpoint",
             "more than " + bytes_text(pickle_bytes_max), "a pickle of names and shapes");
    }
    refill(count);
  }
  const auto bytes = std::span<const std::byte>(buffer_).subspan(taken_, count);
  taken_ += count;
  return bytes;
}

void PickleInput::refill(std::uint64_t count) {
  constexpr std::uint64_t ahead = 64 << 10;
  const std::uint64_t begin = position();
  const std::uint64_t wanted = std::min(std::max(count, ahead), end_ - begin);
  buffer_.resize(wanted);
  source_.read(begin, std::span(buffer_));
  next_ = begin + wanted;
  have_ = wanted;
  taken_ = 0;
}

std::string_view PickleInput::line() {
  line_.clear();
  while (true) {
    const auto next = static_cast<char>(number<unsigned char>());
    if (next == '\n') return line_;
    line_ += next;
  }
}

void PickleInput::refuse(const char* code, std::string message, std::string found,
                         std::string expected) const {
  const std::string field = opcode_name(op_);
  loadstone::refuse(source_.path(), {code, std::move(message), field, std::move(found),
                                     std::move(expected), op_begin_});
}

}  // namespace loadstone
