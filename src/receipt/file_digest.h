// Digests of files that are read for them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "loadstone/receipt.h"
#include "loadstone/storage.h"

namespace loadstone {

// Of ranges that count from `begin` on. Takes a MiB of memory. `goes_on` is told of each read, and
// may end it by false: the digest then means nothing.
[[nodiscard]] std::string file_digest(DigestKind kind, ByteSource& file, std::uint64_t begin,
                                      std::span<const ByteRange> ranges,
                                      const std::function<bool(std::uint64_t)>& goes_on = {});

// All of a tensor's ranges, where the receipt leaves them out.
[[nodiscard]] std::vector<ByteRange> ranges_of(const ReceiptTensor& tensor);

}  // namespace loadstone
