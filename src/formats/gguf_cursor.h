// Tracks the read position in a GGUF file, and throws errors about the item at that position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/digest.h"
#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

class GgufCursor;

// Reads a header of unknown length from the start of a file of up to hundreds of gigabytes. Reads
// sequentially through one small buffer, and computes a digest of the header. Never reads a byte of
// the data, because it reads ahead only as far as set_ahead() allows. Not thread-safe.
class HeaderReader {
 public:
  // If the file ends within a read, `cursor` throws the error.
  HeaderReader(ByteSource& source, const GgufCursor& cursor)
      : source_(source), cursor_(cursor), file_bytes_(source.identity().bytes) {}

  // Declares that at least `bytes` bytes of header follow the next read.
  void set_ahead(std::uint64_t bytes) noexcept { ahead_ = bytes; }

  [[nodiscard]] std::uint64_t file_bytes() const noexcept { return file_bytes_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }
  [[nodiscard]] std::uint64_t remaining() const noexcept { return file_bytes_ - offset_; }

  template <typename Number>
  Number number() {
    static_assert(std::is_arithmetic_v<Number>);
    Number number;
    take(std::as_writable_bytes(std::span(&number, 1)));
    return number;
  }
  // Precondition: `length` <= remaining(), so that the size of the file bounds the allocation.
  std::string text(std::uint64_t length);
  std::vector<std::byte> bytes(std::uint64_t length);

  // Skips everything up to `offset`, or to the end of the file if that comes first.
  void skip_to(std::uint64_t offset);

  [[nodiscard]] const Digest& digest() const noexcept { return digest_; }

 private:
  void take(std::span<std::byte> into);
  void refill(std::size_t needed_bytes);

  static constexpr std::size_t buffer_bytes_max = 256 * 1024;

  ByteSource& source_;
  const GgufCursor& cursor_;
  std::uint64_t file_bytes_;
  std::uint64_t offset_ = 0;  // file offset of the next byte that take() copies
  std::uint64_t ahead_ = 0;
  std::vector<std::byte> buffer_;
  std::size_t position_ = 0;  // index in `buffer_` of the byte at offset_
  Digest digest_;
};

// Not thread-safe.
class GgufCursor {
 public:
  explicit GgufCursor(ByteSource& from)
      : source(from), reader(from, *this), warnings(from.path()) {}
  GgufCursor(const GgufCursor&) = delete;
  GgufCursor& operator=(const GgufCursor&) = delete;

  // Throws an Error about the current key or tensor, with the file and the offset `at`.
  [[noreturn]] void refuse(HeaderProblem problem) const;
  // Throws Error "gg.truncated", because the file ends inside the item that `reading` names.
  [[noreturn]] void file_ends(std::uint64_t wanted_bytes) const;

  template <typename Number>
  Number number() {
    at = reader.offset();
    return reader.number<Number>();
  }
  // Reads a count of items that take at least `each_bytes` each. Throws Error `code` if they cannot
  // fit a file of this size, and "gg.truncated" if they only exceed the rest of the file.
  std::uint64_t length(std::string_view field, const char* code, std::uint64_t each_bytes = 1);

  ByteSource& source;
  HeaderReader reader;
  Warnings warnings;
  std::string culprit;              // current key or tensor
  std::string reading;              // current item, for file_ends()
  std::string_view field = "file";  // field that file_ends() reports
  std::uint64_t at = 0;             // start of the item being checked
};

// Returns printable text. If `text` is not UTF-8, writes its non-ASCII bytes as "\xNN".
[[nodiscard]] std::string printable_bytes(std::string_view text);

}  // namespace loadstone
