// Receipts of a load or conversion: a digest of each tensor read and written, with its recipe.
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

// Both are trees: bytes are cut into blocks of 1 MiB, and the digest covers a tag, the ranges and
// the digests of all blocks. docs/receipt.md specifies the bytes.
enum class DigestKind : std::uint8_t {
  xxh3_128,     // detects accidents, not forgery
  sha256_tree,  // detects tampering, if the receipt itself is kept safe
};

// "xxh3-128", "sha256-tree"
[[nodiscard]] LOADSTONE_API std::string_view name(DigestKind kind) noexcept;
// Throws Error "plan.options" for an unknown name.
[[nodiscard]] LOADSTONE_API DigestKind digest_kind(std::string_view name);
// Returns false for sha256-tree if loadstone was built without OpenSSL.
[[nodiscard]] LOADSTONE_API bool can_digest(DigestKind kind) noexcept;

// Returns the hexadecimal digest of bytes in memory, as one range from 0. Throws Error
// "receipt.digest" for a kind that is not built in.
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
  // Ranges of the tensor's bytes, counted from its first; empty: all bytes.
  std::vector<ByteRange> ranges{};
  std::string digest{};  // hexadecimal
  // Operation: "copy", "cast", "decode", "merge", "encode", "constant" ...; empty for sources.
  std::string recipe{};
  std::string codec{};                 // that encoded it; may be empty
  std::vector<std::string> sources{};  // names of tensors

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return end - begin; }
  friend bool operator==(const ReceiptTensor&, const ReceiptTensor&) = default;
};

struct ReceiptFile {
  std::string path{};            // relative to the checkpoint's root, or to the output's folder
  std::uint32_t checkpoint = 0;  // index, if several are joined
  std::uint64_t bytes = 0;
  // Digest of a source's bytes around the data, or of an output's bytes outside of tensors.
  std::vector<ByteRange> header_ranges{};
  std::string header_digest{};
  std::vector<ReceiptTensor> tensors{};  // in the order of the file

  friend bool operator==(const ReceiptFile&, const ReceiptFile&) = default;
};

// Plain data. Independent of threads, windows and instruction sets.
struct Receipt {
  DigestKind kind = DigestKind::xxh3_128;
  std::string program{};                 // version of loadstone
  std::vector<ReceiptFile> sources{};    // files read
  std::vector<ReceiptFile> outputs{};    // files written
  std::vector<ReceiptTensor> targets{};  // of a load: final values in memory

  friend bool operator==(const Receipt&, const Receipt&) = default;
};

[[nodiscard]] LOADSTONE_API std::string to_json(const Receipt& receipt);
// Trusts nothing, and requires that header and tensors cover each byte of an output exactly once.
// Throws Error "receipt.json" with the location.
[[nodiscard]] LOADSTONE_API Receipt receipt_from_json(std::string_view text);

}  // namespace loadstone
