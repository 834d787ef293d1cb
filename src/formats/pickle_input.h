// Reads the bytes of a pickle opcode by opcode, and throws errors that name the opcode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

// Returns a name such as "REDUCE", or "0x05" for an unknown opcode.
[[nodiscard]] std::string opcode_name(unsigned char code);

// Reads a little-endian two's complement integer; returns nullopt if it does not fit 64 bits.
[[nodiscard]] std::optional<std::int64_t> long_number(std::span<const std::byte> bytes) noexcept;

// Reads the file in small steps, up to `pickle_bytes_max` bytes. Not thread-safe.
class PickleInput {
 public:
  PickleInput(ByteSource& source, std::uint64_t begin, std::uint64_t end)
      : source_(source), begin_(begin), end_(end), next_(begin) {}

  [[nodiscard]] unsigned char next_opcode();
  // Returns the next `count` bytes, which stay valid until the next call. Throws Error
  // "pt.truncated", "pt.pickle_too_large", "io.*".
  [[nodiscard]] std::span<const std::byte> take(std::uint64_t count);
  template <typename Number>
  [[nodiscard]] Number number() {
    static_assert(std::is_integral_v<Number>);
    Number value = 0;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  // Returns the bytes up to the next line feed, and skips the line feed.
  [[nodiscard]] std::string_view line();

  [[nodiscard]] std::uint64_t position() const noexcept { return next_ - (have_ - taken_); }
  [[nodiscard]] std::uint64_t consumed() const noexcept { return position() - begin_; }
  [[nodiscard]] std::uint64_t remaining() const noexcept { return end_ - position(); }

  // Throws an Error that names the current opcode and its offset.
  [[noreturn]] void refuse(const char* code, std::string message, std::string found,
                           std::string expected) const;

 private:
  void refill(std::uint64_t count);

  ByteSource& source_;
  std::uint64_t begin_;
  std::uint64_t end_;
  std::uint64_t next_;  // file offset of the buffer's end
  std::vector<std::byte> buffer_;
  std::size_t have_ = 0;
  std::size_t taken_ = 0;
  std::string line_;
  unsigned char op_ = '.';
  std::uint64_t op_begin_ = 0;
};

}  // namespace loadstone
