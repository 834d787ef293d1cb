// Receipts of a conversion's files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/convert.h"
#include "receipt/recorder.h"

namespace loadstone {

// The receipt's entry of a file, without digests.
[[nodiscard]] ReceiptFile planned_file(const Conversion& conversion, std::uint32_t file);

// Groups are files, and their outputs are tensors in the order of the file.
class FileReceipts : public ReceiptRecorder {
 public:
  // Records the `wanted` files. All must live as long.
  FileReceipts(const Conversion& conversion, const ValueSet& values, const OpenShards& shards,
               const std::vector<bool>& wanted, DigestKind kind);

  // Returns the receipt of a file, all bytes of which are in `written`. Throws Error "cancelled" if
  // the run is stopped meanwhile.
  [[nodiscard]] Receipt finish(std::uint32_t file, ByteSource& written);
  // Set when the run ends early.
  [[nodiscard]] std::atomic<bool>& stop() noexcept { return stop_; }

 private:
  const Conversion& conversion_;
  std::atomic<bool> stop_ = false;
};

// An earlier run's receipt of a file that still has its bytes; or the difference.
struct KeptFile {
  std::optional<Receipt> receipt;  // nullopt: the file must be written again
  std::string changed;
};

// Compares the file at `path` with `receipt`, that of the run that finished it, if there is one; if
// `sources` are given, also their tensors that it was made of. `goes_on` receives the bytes of the
// file that are read, and 0 for reads of sources.
[[nodiscard]] KeptFile check_kept(const ReceiptFile& planned, DigestKind kind,
                                  const std::string& path, std::string_view receipt,
                                  const Catalog* sources, Storage& storage, const GoesOn& goes_on);

}  // namespace loadstone
