// Connects the engine to the files of a conversion.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "catalog/open_shards.h"
#include "convert/write/output.h"
#include "engine/run.h"
#include "engine/value_sink.h"
#include "loadstone/convert.h"

namespace loadstone {

// Prevents a conversion larger than memory from filling the system's page cache. Thread-safe.
class CacheRelease {
 public:
  // Determines which sources are already cached. The arguments must outlive the object.
  CacheRelease(const Conversion& conversion, const ValueSet& values, const OpenShards& shards,
               PageCache wanted);

  // Returns true if the pages of sources and outputs are released.
  [[nodiscard]] bool is_on() const noexcept { return is_on_; }
  // Call after all sources of the target have been read.
  void made(std::uint32_t target) const;

 private:
  const ValueSet& values_;
  const OpenShards& shards_;
  bool is_on_;
  std::vector<bool> is_released_;  // by shard
};

// Sink of the engine that writes the files of a conversion. Finishes each file after its last
// target. Thread-safe.
class OutputSink final : public ValueSink {
 public:
  // Writes the `wanted` files from the plan's `values`. Finishes files without tensors at once.
  // Passes finished targets to `cache`, and written bytes to `receipts`, which may be null.
  OutputSink(const Conversion& conversion, const ValueSet& values, const std::vector<bool>& wanted,
             OutputFiles& output, const CacheRelease& cache, FileReceipts* receipts = nullptr);

  // Makes all targets from the shards' sources. `memory` counts its buffers.
  [[nodiscard]] RunReport make(std::span<const std::shared_ptr<ByteSource>> sources,
                               MemoryCount& memory, Observer* observer = nullptr);

  [[nodiscard]] std::byte* place(std::uint32_t, std::size_t) override { return nullptr; }
  // Throws Error "q.scale_value" if a scale has no finite reciprocal, and errors of writing. The
  // first output tensors of a target are its components, in their order.
  void write(std::uint32_t target, std::size_t part, std::uint64_t offset,
             std::span<std::byte> bytes) override;
  [[nodiscard]] bool compares() const noexcept override { return true; }
  void compared(std::uint32_t target, const EncodingLoss& loss) override;
  void finish(std::uint32_t target) override;

  // Returns the losses of targets that were codes before, by target. Call after make().
  [[nodiscard]] const std::map<std::uint32_t, EncodingLoss>& losses() const { return losses_; }

 private:
  // Position of a target's first tensor in tensors_, where its tensors are contiguous.
  struct Place {
    std::uint32_t file = 0;
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };

  [[nodiscard]] GroupList groups() const;
  [[nodiscard]] std::span<const OutputTensor* const> tensors_of(std::uint32_t target) const;
  void write(std::uint32_t file, const OutputTensor& tensor, std::uint64_t offset,
             std::span<const std::byte> bytes);

  const Conversion& conversion_;
  const ValueSet& values_;
  OutputFiles& output_;
  const CacheRelease& cache_;
  FileReceipts* const receipts_;
  std::vector<bool> wanted_;
  std::vector<Place> places_;  // by target
  std::vector<const OutputTensor*> tensors_;
  std::vector<std::atomic<std::uint64_t>> targets_left_;  // by file
  std::mutex mutex_;
  std::map<std::uint32_t, EncodingLoss> losses_;  // by target; guarded by mutex_
  // Targets with a scale whose stored reciprocal is rounded; guarded by mutex_.
  std::set<std::uint32_t> rounded_;
};

// Makes one file of a conversion and passes its data, without the header, to `files`. Returns the
// number of bytes read. Throws the read errors of convert().
std::uint64_t make_file(const Conversion& conversion, std::uint32_t file, OutputFiles& files,
                        Observer* observer, Storage* storage);

}  // namespace loadstone
