// The digests of a load: its sources as they are read, its targets as they are made.
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
// hashed as they are made; transposed values and those on devices are read again at the end.
// Used from one thread, except for sources() and the sink.
class LoadDigests {
 public:
  // Watches the sink. All must live as long.
  LoadDigests(const Plan& plan, const ValueSet& values, std::span<const Destination> destinations,
              const OpenShards& shards, MemorySink& sink, DigestKind kind);

  // The sources that the load must read through.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_.sources();
  }

  // Call it after the threads have ended; it starts `threads` of its own.
  [[nodiscard]] std::shared_ptr<const Receipt> finish(unsigned threads);

 private:
  // One part of a target.
  struct Entry {
    ReceiptTensor tensor;
    std::uint32_t target = 0;
    std::size_t part = 0;
    std::uint32_t item = 0;
    const Box* copied = nullptr;  // from a whole tensor of a file
  };

  void add_entries(std::uint32_t target);
  void complete(Entry& entry);
  [[nodiscard]] ReceiptTensor entry_of(const PlannedTarget& target, Encoding encoding,
                                       const Shape& shape, std::uint64_t bytes) const;

  const Plan& plan_;
  MemorySink& sink_;
  SourceDigests sources_;
  DigestTable outputs_;
  std::vector<Entry> entries_;
  std::vector<std::size_t> first_entry_;  // by target; of its parts
};

}  // namespace loadstone
