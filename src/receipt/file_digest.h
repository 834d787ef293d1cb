// Computes digests of files by reading them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "loadstone/receipt.h"
#include "loadstone/storage.h"
#include "receipt/digest_table.h"

namespace loadstone {

// Returns the digest of the ranges, which are relative to `begin`; empty if it was cancelled. Uses
// 1 MiB of memory.
[[nodiscard]] std::string file_digest(DigestKind kind, ByteSource& file, std::uint64_t begin,
                                      const std::vector<ByteRange>& ranges,
                                      const GoesOn& goes_on = {});

// Returns the receipt's ranges for a tensor. Without ranges in the receipt, returns all bytes of
// the tensor as one range.
[[nodiscard]] std::vector<ByteRange> ranges_of(const ReceiptTensor& tensor);

}  // namespace loadstone
