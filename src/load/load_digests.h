// The digests of a load: its sources as they are read, and its targets as they stand in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "catalog/open_shards.h"
#include "load/memory_sink.h"
#include "load/source_digests.h"
#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"

namespace loadstone {

// A target that is a whole tensor of a file, byte by byte, has that tensor's digest. All others are
// hashed in memory, when all is there. Used from one thread, but for sources().
class LoadDigests {
 public:
  // All must live as long.
  LoadDigests(const Plan& plan, const ValueSet& values, std::span<const Destination> destinations,
              const OpenShards& shards, DigestKind kind);

  // What the load reads from.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_.sources();
  }

  // After the threads have ended; starts so many of its own.
  [[nodiscard]] std::shared_ptr<const Receipt> finish(std::span<const Destination> destinations,
                                                      MemorySink& sink, unsigned threads);

 private:
  // Of a target's part; without a digest, where that is to be taken of its memory.
  struct Entry {
    ReceiptTensor tensor;
    std::uint32_t target = 0;
    std::size_t part = 0;
  };

  void add_entries(std::uint32_t target, std::vector<Entry>& entries);
  [[nodiscard]] std::string digest_in_memory(const Entry& entry, MemorySink& sink) const;
  [[nodiscard]] ReceiptTensor entry_of(const PlannedTarget& target, Encoding encoding,
                                       const Shape& shape, std::uint64_t bytes) const;

  const Plan& plan_;
  const DigestKind kind_;
  SourceDigests sources_;
};

}  // namespace loadstone
