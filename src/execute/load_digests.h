// The digests of a load: its sources as they are read, and its targets as they stand in memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "execute/shard_files.h"
#include "execute/source_digests.h"
#include "execute/value_sink.h"
#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"

namespace loadstone {

// A target that is a whole tensor of a file, byte by byte, has that tensor's digest. All others are
// hashed in memory, when all is there. Used from one thread, but for sources().
class LoadDigests {
 public:
  // All must live as long.
  LoadDigests(const Plan& plan, std::span<const Destination> destinations, const OpenShards& shards,
              DigestKind kind);

  [[nodiscard]] SourceDigests& sources() noexcept { return sources_; }

  // After the threads have ended; starts so many of its own.
  [[nodiscard]] Receipt finish(std::span<const Destination> destinations, ValueSink& sink,
                               unsigned threads);

 private:
  // A target's entry, and its memory; none where the digest is known.
  struct Entry {
    ReceiptTensor tensor;
    std::span<const std::byte> memory;
  };

  void add_entries(std::uint32_t target, ValueSink& sink, std::vector<Entry>& entries);
  [[nodiscard]] ReceiptTensor entry_of(const PlannedTarget& target, Encoding encoding,
                                       const Shape& shape, std::uint64_t bytes) const;

  const Plan& plan_;
  const DigestKind kind_;
  SourceDigests sources_;
};

}  // namespace loadstone
