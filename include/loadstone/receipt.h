// The receipt of a load or conversion: a digest of each tensor read and written, with its recipe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/byte_range.h"
#include "loadstone/export.h"

namespace loadstone {

// Both are trees: bytes are cut into blocks of 1 MiB from their first one on, and the digest is
// that of a tag, the ranges and the digests of all blocks. docs/receipt.md has the bytes.
enum class DigestKind : std::uint8_t {
  xxh3_128,     // detects accidents, not forgery
  sha256_tree,  // proof against tampering, where the receipt itself is kept safe
};

// "xxh3-128", "sha256-tree"
[[nodiscard]] LOADSTONE_API std::string_view name(DigestKind kind) noexcept;
// Throws Error "plan.options" for another name.
[[nodiscard]] LOADSTONE_API DigestKind digest_kind(std::string_view name);
// False for sha256-tree where loadstone was built without OpenSSL.
[[nodiscard]] LOADSTONE_API bool can_digest(DigestKind kind) noexcept;

// Hexadecimal digest of bytes at hand, as one range from 0 on. Throws Error "receipt.digest" for a
// kind that is not built in.
[[nodiscard]] LOADSTONE_API std::string digest_of(DigestKind kind,
                                                  std::span<const std::byte> bytes);

// A tensor of a file, a component of one, or a value in memory.
struct ReceiptTensor {
  std::string name{};
  std::string component{};  // of a quantized tensor; else empty
  std::string encoding{};   // "BF16", "Q4_K"
  std::vector<std::uint64_t> shape{};
  std::uint64_t begin = 0;  // bytes in the file; 0 for a value in memory
  std::uint64_t end = 0;
  // Of the tensor's bytes, from its first one on; empty: all of them.
  std::vector<ByteRange> ranges{};
  std::string digest{};  // hexadecimal
  // How it was made: "copy", "cast", "decode", "merge", "encode", "constant" ...; none for sources.
  std::string recipe{};
  std::string codec{};                 // that encoded it; else empty
  std::vector<std::string> sources{};  // names of tensors

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return end - begin; }
  friend bool operator==(const ReceiptTensor&, const ReceiptTensor&) = default;
};

struct ReceiptFile {
  std::string path{};            // relative to the checkpoint's root, or to the output's folder
  std::uint32_t checkpoint = 0;  // of sources that are joined: which one
  std::uint64_t bytes = 0;
  // Of a source: around the data. Of an output: all that is no tensor.
  std::vector<ByteRange> header_ranges{};
  std::string header_digest{};
  std::vector<ReceiptTensor> tensors{};  // in the order of the file

  friend bool operator==(const ReceiptFile&, const ReceiptFile&) = default;
};

// Plain data. It does not depend on threads, windows or instruction sets.
struct Receipt {
  DigestKind kind = DigestKind::xxh3_128;
  std::string program{};                 // version of loadstone
  std::vector<ReceiptFile> sources{};    // that were read from
  std::vector<ReceiptFile> outputs{};    // that were written
  std::vector<ReceiptTensor> targets{};  // of a load: values as they stood in memory

  friend bool operator==(const Receipt&, const Receipt&) = default;
};

[[nodiscard]] LOADSTONE_API std::string to_json(const Receipt& receipt);
// Trusts nothing, and requires that header and tensors cover each byte of an output exactly once.
// Throws Error "receipt.json" with the place.
[[nodiscard]] LOADSTONE_API Receipt receipt_from_json(std::string_view text);

}  // namespace loadstone
