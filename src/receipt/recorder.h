// Makes the receipt of a load or a conversion. Hashes sources while they are read, and outputs
// while they are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "boxes/value.h"
#include "catalog/open_shards.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"
#include "receipt/digest_table.h"

namespace loadstone {

// Returns the tensors that were read during planning and that determine the value: alphas of
// adapters, states of quantized tensors, and scales that became constants.
[[nodiscard]] std::vector<std::uint32_t> deciding_tensors(const ValueSet& values,
                                                          const Value& value);

// Records receipts of groups. A group consists of outputs and their sources: a load is one group,
// and each file of a conversion is one group. If a group needs only parts of a tensor, the receipt
// lists the ranges that its boxes need; gaps of less than 64 KiB are included. Call need(), add()
// and prepare() first; the other functions are then thread-safe.
class ReceiptRecorder {
 public:
  // Returns one source per shard. A source hashes the bytes it reads. The run must read through
  // these sources.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }
  // Hashes bytes of the group's output with index `output`.
  void wrote(std::size_t group, std::size_t output, std::uint64_t offset,
             std::span<const std::byte> bytes);

 protected:
  // Callback that reads bytes [begin, begin + to.size()) of an output.
  using Read =
      std::function<void(std::size_t output, std::uint64_t begin, std::span<std::byte> to)>;

  // The arguments must outlive the object. `shards` contains all shards that are needed.
  // `waiting_bytes_max` applies to sources and to outputs separately.
  ReceiptRecorder(const ValueSet& values, const OpenShards& shards, DigestKind kind,
                  std::size_t groups, std::uint64_t waiting_bytes_max);
  ~ReceiptRecorder() = default;

  void need(std::size_t group, const Value& value);
  // Adds an output. `copied`: the tensor of which the output is a byte-by-byte copy; both have the
  // same digest.
  void add(std::size_t group, std::uint64_t bytes, std::optional<std::uint32_t> copied = {});
  void prepare();

  // Number of steps to complete a group after its run has ended. complete() of each step reads the
  // bytes that were not hashed: bytes_left() bytes in all. Different threads may complete different
  // steps.
  [[nodiscard]] std::size_t step_count(std::size_t group) const noexcept {
    return groups_[group].steps.size();
  }
  [[nodiscard]] std::uint64_t bytes_left(std::size_t group) const;
  void complete(std::size_t group, std::size_t step, const Read& read, const GoesOn& goes_on = {});
  // Sets the digests of the outputs of a completed group. Returns the group's receipt, with its
  // sources.
  [[nodiscard]] Receipt receipt_of(std::size_t group, std::span<ReceiptTensor> outputs);

 private:
  class Source;
  struct Needed {
    std::vector<ByteRange> ranges;
    std::uint32_t item = 0;
  };
  struct Output {
    std::uint32_t item = 0;
    std::optional<std::uint32_t> copied;
  };
  // An item to complete: an output, or bytes of a source. Offsets in a source are relative to
  // `begin`.
  struct Step {
    DigestTable* table = nullptr;
    std::uint32_t item = 0;
    std::size_t output = 0;
    ByteSource* source = nullptr;  // null if the item is an output
    std::uint64_t begin = 0;
  };
  struct Group {
    std::map<std::uint32_t, Needed> needed;          // by tensor
    std::map<std::uint32_t, std::uint32_t> headers;  // indices of items, by shard
    std::vector<Output> outputs;
    std::vector<Step> steps;
  };
  // Byte range of an item in a file.
  struct Place {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t end_max = 0;  // largest end of all places up to this one
    std::uint32_t item = 0;
  };

  const ValueSet& values_;
  const OpenShards& shards_;
  DigestTable read_;
  DigestTable written_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
  std::vector<Group> groups_;
  std::vector<std::vector<Place>> places_;  // by shard
};

// Returns the receipt's entry for a shard, without digests and tensors.
[[nodiscard]] ReceiptFile source_file(const Catalog& catalog, std::uint32_t shard);

// Returns the receipt's entry for a target, or for one component of a quantized target, without a
// digest. `recipe` in the entry is "copy", "cast", "reorder", "decode", "merge", "encode", or the
// target's origin.
[[nodiscard]] ReceiptTensor planned_tensor(const Plan& plan, const PlannedTarget& target,
                                           const QuantizedPart* part);

// Joins receipts in the order of the files. A source that several receipts share is listed once.
// Throws Error "io.changed" if two receipts have different digests for a source.
[[nodiscard]] Receipt joined_receipt(DigestKind kind, const std::vector<Receipt>& receipts);

}  // namespace loadstone
