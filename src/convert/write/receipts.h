// Makes and checks the receipts of a conversion's files.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/convert.h"
#include "receipt/recorder.h"

namespace loadstone {

// Returns the receipt's entry for a file, without digests.
[[nodiscard]] ReceiptFile planned_file(const Conversion& conversion, std::uint32_t file);

// Records receipts with one group per file. A group's outputs are the file's tensors, in order.
class FileReceipts : public ReceiptRecorder {
 public:
  // Records the `wanted` files. The arguments must outlive the object.
  FileReceipts(const Conversion& conversion, const ValueSet& values, const OpenShards& shards,
               const std::vector<bool>& wanted, DigestKind kind);

  // Records the loss of a target for the receipt of its file. Thread-safe.
  void note_loss(std::uint32_t target, const EncodingLoss& loss);
  // Returns the receipt of a file, whose bytes can all be read from `written`. Throws Error
  // "cancelled" if the run is stopped meanwhile.
  [[nodiscard]] Receipt finish(std::uint32_t file, ByteSource& written);
  // Flag to set when the run ends early.
  [[nodiscard]] std::atomic<bool>& stop() noexcept { return stop_; }

 private:
  const Conversion& conversion_;
  std::atomic<bool> stop_ = false;
  std::mutex losses_mutex_;
  std::map<std::uint32_t, EncodingLoss> losses_;  // by target; guarded by losses_mutex_
};

// Result of a check of a file that an earlier run finished: its receipt, or the difference.
struct KeptFile {
  std::optional<Receipt> receipt;  // nullopt: the file must be written again
  std::string changed;
  std::uint64_t bytes_read = 0;  // of the file and its sources
};

// Compares the file at `path` with `receipt`, which the run that finished the file wrote. If
// `compares_sources`, also compares the source tensors that the file was made of. If the receipt
// has digests of a kind other than `kind`, compares both and then computes the digests again;
// nullopt: any kind. Calls `goes_on` with the number of bytes compared in the file, and with 0 for
// other reads.
[[nodiscard]] KeptFile check_kept(const ReceiptFile& planned, std::optional<DigestKind> kind,
                                  const std::string& path, std::string_view receipt,
                                  const Catalog& catalog, bool compares_sources, Storage& storage,
                                  const GoesOn& goes_on);

}  // namespace loadstone
