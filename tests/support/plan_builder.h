// Builds checkpoints in memory and plans for tests, with a log of reads and injected faults.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone::testing {

using Bytes = std::vector<std::byte>;

// Returns how many bytes a load may use in addition to the values.
[[nodiscard]] std::uint64_t bytes_promised(const Plan& plan);

// Returns bytes that differ by position. They depend only on the arguments.
[[nodiscard]] Bytes pattern(std::size_t count, std::uint64_t seed);

struct ReadEvent {
  std::string path;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// A storage of files in memory. Thread-safe except for adding files.
class MemoryStorage final : public Storage {
 public:
  struct File {
    Bytes bytes;
    std::atomic<std::int64_t> modified_ns = 1;
  };

  File& add(const std::string& path, Bytes bytes);

  // Called before each read with the read's index, from 0. May throw, change files, or wait.
  std::function<void(std::size_t number, const ReadEvent& event)> before_read;

  [[nodiscard]] std::vector<ReadEvent> reads() const;
  // Returns the requests ahead of reads. Must not be called during a load.
  [[nodiscard]] const std::vector<ReadEvent>& asked() const { return asked_; }
  [[nodiscard]] std::uint64_t bytes_read() const;

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override;
  [[nodiscard]] EntryKind kind(const std::string& path) override;
  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override;
  [[nodiscard]] std::string resolve(const std::string& path) override { return path; }

 private:
  friend class MemorySource;
  std::map<std::string, std::unique_ptr<File>> files_;
  mutable std::mutex mutex_;
  std::vector<ReadEvent> reads_;
  std::vector<ReadEvent> asked_;
};

// Adds tensors to shards and targets to a plan.
class PlanBuilder {
 public:
  PlanBuilder();

  // Starts a new shard. add_tensor() adds to the last shard.
  void add_shard(const std::string& path = "");
  // Returns the tensor's index. `gap` is the number of unused bytes before the tensor.
  std::uint32_t add_tensor(const std::string& name, Encoding encoding, Shape shape, Bytes bytes,
                           std::size_t gap = 0);
  PlannedTarget& add_target(const std::string& name, Dtype dtype, Shape shape,
                            std::vector<Box> boxes);
  // Adds a tensor and a target with the same name. The load copies or casts the tensor.
  PlannedTarget& add_plain(const std::string& name, Dtype source, Dtype target, Shape shape,
                           Bytes bytes);

  // Returns the plan and adds the shards to the storage. Must be called only once.
  [[nodiscard]] Plan build();

  [[nodiscard]] const TensorInfo& tensor(std::uint32_t index) const { return tensors_[index]; }
  [[nodiscard]] const Bytes& bytes_of(std::uint32_t tensor) const { return values_[tensor]; }

  MemoryStorage storage;
  std::uint64_t staging_bytes_max = 1 << 20;
  std::vector<Decoding> decodings;

 private:
  std::vector<Shard> shards_;
  std::vector<Bytes> files_;
  std::vector<TensorInfo> tensors_;
  std::vector<Bytes> values_;
  std::vector<PlannedTarget> targets_;
};

// Returns the box that copies a whole tensor to a target with the same shape.
[[nodiscard]] Box whole(std::uint32_t source, const Shape& shape);

// Returns the expected bytes of a target, by copying each box element by element.
[[nodiscard]] Bytes expected_value(const PlanBuilder& builder, const PlannedTarget& target);

// Adds two shards and a target for each kind of copy.
void add_all_movements(PlanBuilder& builder);

// Returns the error that the action throws. The test fails if the action throws none.
[[nodiscard]] Error error_of(const std::function<void()>& action);

// Loads into new memory and compares every target with expected_value().
Report load_and_compare(PlanBuilder& builder, const Plan& plan, ExecuteOptions options = {});

// Returns the bytes of a destination.
[[nodiscard]] Bytes value_of(const Destination& destination);

}  // namespace loadstone::testing
