// The read position in a GGUF file, and errors about the item at that position.
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

// Reads a header of unknown length from the front of a file that may be hundreds of gigabytes long:
// sequentially, through one small buffer, with a digest of all that was passed. Reads ahead only as
// far as the header is known to reach, so that not a byte of data is read: see set_ahead(). Not
// thread-safe.
class HeaderReader {
 public:
  // `cursor` throws if the file ends within a read.
  HeaderReader(ByteSource& source, const GgufCursor& cursor)
      : source_(source), cursor_(cursor), file_bytes_(source.identity().bytes) {}

  // At least `bytes` of header follow the next read.
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
  // Precondition: `length` <= remaining(), so that a file's claim alone never allocates memory.
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
  std::uint64_t offset_ = 0;  // of the next byte to be taken
  std::uint64_t ahead_ = 0;
  std::vector<std::byte> buffer_;
  std::size_t position_ = 0;  // in the buffer
  Digest digest_;
};

// Not thread-safe.
class GgufCursor {
 public:
  explicit GgufCursor(ByteSource& from)
      : source(from), reader(from, *this), warnings(from.path()) {}
  GgufCursor(const GgufCursor&) = delete;
  GgufCursor& operator=(const GgufCursor&) = delete;

  // Adds the file, the current key or tensor, and its offset.
  [[noreturn]] void refuse(HeaderProblem problem) const;
  // The file ends before what `reading` names is complete.
  [[noreturn]] void file_ends(std::uint64_t wanted_bytes) const;

  template <typename Number>
  Number number() {
    at = reader.offset();
    return reader.number<Number>();
  }
  // Reads a count of items of at least `each_bytes` and checks it against the file. A count that no
  // file of this size can have gets `code`; one that only exceeds the end means a truncated file.
  std::uint64_t length(std::string_view field, const char* code, std::uint64_t each_bytes = 1);

  ByteSource& source;
  HeaderReader reader;
  Warnings warnings;
  std::string culprit;              // key or tensor at hand
  std::string reading;              // for file_ends()
  std::string_view field = "file";  // the same
  std::uint64_t at = 0;             // start of the item being checked
};

// Returns text unchanged, and other bytes with escapes.
[[nodiscard]] std::string printable_bytes(std::string_view text);

}  // namespace loadstone
