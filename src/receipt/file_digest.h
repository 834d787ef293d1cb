// Digests of files that are read for them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "loadstone/receipt.h"
#include "loadstone/storage.h"
#include "receipt/digest_table.h"

namespace loadstone {

// Returns the digest of ranges relative to `begin`; empty if it was cancelled. Takes 1 MiB of
// memory.
[[nodiscard]] std::string file_digest(DigestKind kind, ByteSource& file, std::uint64_t begin,
                                      const std::vector<ByteRange>& ranges,
                                      const GoesOn& goes_on = {});

// Returns all bytes of a tensor as a range, if the receipt has no ranges for it.
[[nodiscard]] std::vector<ByteRange> ranges_of(const ReceiptTensor& tensor);

}  // namespace loadstone
