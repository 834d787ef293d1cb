// Makes the receipt of a load or a conversion: hashes sources while they are read, and outputs
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

// Returns the tensors that were read while the value was planned, and decide it: alphas of
// adapters, states of quantized tensors, scales that became constants.
[[nodiscard]] std::vector<std::uint32_t> deciding_tensors(const ValueSet& values,
                                                          const Value& value);

// Outputs and their sources form groups, each with a receipt: a load is one group, each file of a
// conversion is one. If a group needs parts of a tensor, it has the ranges that its boxes touch,
// with holes of less than 64 KiB. need(), add() and prepare() come first; then the others are
// thread-safe.
class ReceiptRecorder {
 public:
  // The shards' sources, which hash the bytes that pass: the run must read through them.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }
  // Receives bytes of the group's output of this index.
  void wrote(std::size_t group, std::size_t output, std::uint64_t offset,
             std::span<const std::byte> bytes);

 protected:
  // Reads bytes [begin, begin + to.size()) of an output.
  using Read =
      std::function<void(std::size_t output, std::uint64_t begin, std::span<std::byte> to)>;

  // All must live as long; `shards` holds those that are needed. Sources and outputs may each have
  // `waiting_bytes_max`.
  ReceiptRecorder(const ValueSet& values, const OpenShards& shards, DigestKind kind,
                  std::size_t groups, std::uint64_t waiting_bytes_max);
  ~ReceiptRecorder() = default;

  void need(std::size_t group, const Value& value);
  // Adds an output. `copied`: the tensor that it is, byte by byte; it has that tensor's digest.
  void add(std::size_t group, std::uint64_t bytes, std::optional<std::uint32_t> copied = {});
  void prepare();

  // The run has ended for the group: complete() of each step below step_count() reads the bytes
  // that were not hashed, bytes_left() in all. Different threads may complete different steps.
  [[nodiscard]] std::size_t step_count(std::size_t group) const noexcept {
    return groups_[group].steps.size();
  }
  [[nodiscard]] std::uint64_t bytes_left(std::size_t group) const;
  void complete(std::size_t group, std::size_t step, const Read& read, const GoesOn& goes_on = {});
  // Sets the digests of the outputs of a completed group. Returns its receipt with the sources.
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
  // An item of an output, or of bytes of a source that count from `begin`.
  struct Step {
    DigestTable* table = nullptr;
    std::uint32_t item = 0;
    std::size_t output = 0;
    ByteSource* source = nullptr;  // null: an output
    std::uint64_t begin = 0;
  };
  struct Group {
    std::map<std::uint32_t, Needed> needed;          // by tensor
    std::map<std::uint32_t, std::uint32_t> headers;  // items, by shard
    std::vector<Output> outputs;
    std::vector<Step> steps;
  };
  // The bytes of an item in a file.
  struct Place {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t end_max = 0;  // of all places up to this one
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

// The entry of a shard without digests and tensors.
[[nodiscard]] ReceiptFile source_file(const Catalog& catalog, std::uint32_t shard);

// The entry of a target, or of one part of its quantization, without a digest. `recipe` is "copy",
// "cast", "reorder", "decode", "merge", "encode", or the target's origin.
[[nodiscard]] ReceiptTensor planned_tensor(const Plan& plan, const PlannedTarget& target,
                                           const QuantizedPart* part);

// Joins receipts: a source of several is listed once, in the order of the files. Throws Error
// "io.changed" if a source had different bytes for two of them.
[[nodiscard]] Receipt joined_receipt(DigestKind kind, const std::vector<Receipt>& receipts);

}  // namespace loadstone
