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
#include "loadstone/quantization.h"

namespace loadstone {

// Algorithm of digests. Each is a tree: the bytes are cut into blocks of 1 MiB, and the digest
// covers a tag, the ranges and the digests of all blocks. docs/receipt.md specifies the bytes.
enum class DigestKind : std::uint8_t {
  xxh3_128,     // detects accidental changes, but not forgery
  sha256_tree,  // detects tampering, if the receipt itself is kept safe
};

// Returns "xxh3-128" or "sha256-tree".
[[nodiscard]] LOADSTONE_API std::string_view name(DigestKind kind) noexcept;
// Parses the name. Throws Error "plan.options" if it is unknown.
[[nodiscard]] LOADSTONE_API DigestKind digest_kind(std::string_view name);
// Returns false for sha256-tree if loadstone was built without OpenSSL.
[[nodiscard]] LOADSTONE_API bool can_digest(DigestKind kind) noexcept;

// Returns the hexadecimal digest of bytes in memory, as one range from 0. Throws Error
// "receipt.digest" for a kind that is not built in.
[[nodiscard]] LOADSTONE_API std::string digest_of(DigestKind kind,
                                                  std::span<const std::byte> bytes);

// A tensor of a file, a component of a quantized tensor, or a value in memory.
struct ReceiptTensor {
  std::string name{};
  std::string component{};  // role in a quantized tensor, otherwise empty
  std::string encoding{};   // "BF16", "Q4_K"
  std::vector<std::uint64_t> shape{};
  std::uint64_t begin = 0;  // byte offsets in the file; 0 for a value in memory
  std::uint64_t end = 0;
  // Ranges of the tensor's bytes that the digest covers, relative to the first; empty: all bytes.
  std::vector<ByteRange> ranges{};
  std::string digest{};  // hexadecimal
  // Operation that made the tensor: "copy", "cast", "decode", "merge", "encode", "constant" ...;
  // empty for sources.
  std::string recipe{};
  std::string codec{};                 // codec that encoded the tensor; may be empty
  std::vector<std::string> sources{};  // names of the source tensors
  // For the data of a tensor that was codes before, and was encoded again.
  std::optional<EncodingLoss> loss{};

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return end - begin; }
  friend bool operator==(const ReceiptTensor&, const ReceiptTensor&) = default;
};

struct ReceiptFile {
  std::string path{};            // relative to the checkpoint's root, or to the output's folder
  std::uint32_t checkpoint = 0;  // index of the checkpoint, if several are joined
  std::uint64_t bytes = 0;
  // Ranges and digest of a source's bytes around the data, or of an output's bytes outside of
  // tensors.
  std::vector<ByteRange> header_ranges{};
  std::string header_digest{};
  std::vector<ReceiptTensor> tensors{};  // in the order of the file

  friend bool operator==(const ReceiptFile&, const ReceiptFile&) = default;
};

// Plain data. The same for any number of threads, window size and instruction set.
struct Receipt {
  DigestKind kind = DigestKind::xxh3_128;
  std::string program{};                 // version of loadstone
  std::vector<ReceiptFile> sources{};    // files that were read
  std::vector<ReceiptFile> outputs{};    // files that were written
  std::vector<ReceiptTensor> targets{};  // for a load: the final values in memory

  friend bool operator==(const Receipt&, const Receipt&) = default;
};

[[nodiscard]] LOADSTONE_API std::string to_json(const Receipt& receipt);
// Reads a receipt from JSON. Requires that the header and the tensors of an output cover each byte
// exactly once. Throws Error "receipt.json" with the location of a mistake.
[[nodiscard]] LOADSTONE_API Receipt receipt_from_json(std::string_view text);

}  // namespace loadstone
