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

// Returns the digest of ranges, which count from `begin` on; empty if it was ended early. Takes a
// MiB of memory.
[[nodiscard]] std::string file_digest(DigestKind kind, ByteSource& file, std::uint64_t begin,
                                      const std::vector<ByteRange>& ranges,
                                      const GoesOn& goes_on = {});

// All of a tensor's ranges, where the receipt leaves them out.
[[nodiscard]] std::vector<ByteRange> ranges_of(const ReceiptTensor& tensor);

}  // namespace loadstone
