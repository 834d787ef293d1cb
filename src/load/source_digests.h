// Digests of sources, taken of what the engine reads while it is in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "boxes/value.h"
#include "catalog/open_shards.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"
#include "receipt/digest_table.h"

namespace loadstone {

// The sources that groups of targets need: a load is one group, each file of a conversion one. A
// tensor of which a group needs parts has the ranges that its boxes touch, with holes of less than
// 64 KiB. Reads of sources() are hashed as they pass. need() and prepare() come first; sources()
// and complete() are thread-safe after them.
class SourceDigests {
 public:
  // Both must live as long; `shards` holds those that are needed.
  SourceDigests(const ValueSet& values, const OpenShards& shards, DigestKind kind,
                std::size_t groups,
                std::uint64_t waiting_bytes_max = DigestTable::waiting_bytes_default);

  void need(std::size_t group, const Value& value);
  void prepare();

  // The shards' sources; they hash the bytes that pass.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }
  // All of the group's bytes that the engine reads have come: reads the rest.
  void complete(std::size_t group);
  // Of a completed group.
  [[nodiscard]] std::vector<ReceiptFile> files(std::size_t group);

  // The digest of the tensor, where the group needs all of it; null otherwise.
  [[nodiscard]] const std::string* whole_digest(std::size_t group, std::uint32_t tensor) const;
  [[nodiscard]] std::uint64_t bytes_read_again() const noexcept {
    return table_.bytes_read_again();
  }

 private:
  // An item of the table: ranges of a tensor.
  struct Needed {
    std::vector<ByteRange> ranges;
    std::uint32_t item = 0;
  };
  // In a file, an item of the table.
  struct Place {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t end_max = 0;  // of all places up to this one
    std::uint32_t item = 0;
  };

  class Source;

  void hash(std::uint32_t shard, std::uint64_t begin, std::span<const std::span<std::byte>> parts);
  void need_box(std::size_t group, const Box& box);
  void add(std::size_t group, std::uint32_t tensor, std::vector<ByteRange> ranges);
  [[nodiscard]] ReceiptFile file_of(std::uint32_t shard);

  const ValueSet& values_;
  const OpenShards& shards_;
  DigestTable table_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
  std::vector<std::map<std::uint32_t, Needed>> needed_;  // by group and tensor
  std::vector<std::vector<Place>> places_;               // by shard
};

// As receipts name it: readers of receipts open no path that leaves its folder.
[[nodiscard]] std::string receipt_path(const Shard& shard);
// How a target is made, in a word: "copy", "cast", "reorder", "decode", "merge", "constant",
// "zeros", or its origin.
[[nodiscard]] std::string recipe_word(const Plan& plan, const PlannedTarget& target);
// The box of a target that is a whole tensor of a file, byte by byte; null for others.
[[nodiscard]] const Box* whole_copy(const Plan& plan, const PlannedTarget& target);
// Names of the tensors that it is made of.
[[nodiscard]] std::vector<std::string> source_names(const Plan& plan, const PlannedTarget& target);

}  // namespace loadstone
