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

// Of ranges that count from `begin` on. Takes a MiB of memory. Empty if it was ended early.
[[nodiscard]] std::string file_digest(DigestKind kind, ByteSource& file, std::uint64_t begin,
                                      const std::vector<ByteRange>& ranges,
                                      const GoesOn& goes_on = {});

// All of a tensor's ranges, where the receipt leaves them out.
[[nodiscard]] std::vector<ByteRange> ranges_of(const ReceiptTensor& tensor);

}  // namespace loadstone
