// The receipt of a conversion while it is made: a file at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "load/source_digests.h"
#include "loadstone/convert.h"
#include "loadstone/receipt.h"
#include "receipt/digest_table.h"

namespace loadstone {

// wrote() and finish() are thread-safe, as sources() is.
class ReceiptRecorder {
 public:
  // Of the `wanted` files. All must live as long.
  ReceiptRecorder(const Conversion& conversion, const ValueSet& values, const OpenShards& shards,
                  const std::vector<bool>& wanted, DigestKind kind);

  // The sources that the files must be read through.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_.sources();
  }
  void wrote(std::uint32_t file, const OutputTensor& tensor, std::uint64_t offset,
             std::span<const std::byte> bytes);
  // The receipt of one file, all bytes of which are written: `file` has them, `header` is its own.
  // `path`: in the target's folder.
  [[nodiscard]] Receipt finish(std::uint32_t file, const std::string& path, ByteSource& written);

 private:
  const Conversion& conversion_;
  SourceDigests sources_;
  DigestTable outputs_;
  std::vector<std::vector<std::uint32_t>> items_;  // by file and tensor
};

// The receipt's entry of such a file, without digests.
[[nodiscard]] ReceiptFile planned_file(const Conversion& conversion, std::uint32_t file,
                                       const std::string& path);

// Puts the receipts of files together: sources that several files are made of once. The order is
// that of the files. Throws Error "io.changed" where a source had other bytes for one file than for
// another.
[[nodiscard]] Receipt joined_receipt(DigestKind kind, const std::vector<Receipt>& files);

// A file next to the model: all of it is "header".
[[nodiscard]] ReceiptFile receipt_of_extra(DigestKind kind, const std::string& name,
                                           ByteSource& file);

// An earlier run's receipt of a file, if the file, and on demand its sources, still have these
// bytes. Otherwise `changed` names the one that differs.
struct KeptFile {
  std::optional<Receipt> receipt;  // nothing: the file is to be made again
  std::string changed;
};
[[nodiscard]] KeptFile check_kept(const Conversion& conversion, std::uint32_t file, DigestKind kind,
                                  const std::string& receipt_text, const std::string& path,
                                  Storage& storage, bool checks_sources);

}  // namespace loadstone
