// The files of a conversion as a sink of the engine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "convert/cache_release.h"
#include "convert/output.h"
#include "convert/recorder.h"
#include "engine/run.h"
#include "loadstone/convert.h"

namespace loadstone {

// Thread-safe. Finishes each file when its last target is finished.
class OutputSink final : public ValueSink {
 public:
  // Of the `wanted` files; `values` are those of the plan. Those without tensors are finished here.
  // `cache`: is told which targets are made. `recorder`: what is written; null: nobody.
  OutputSink(const Conversion& conversion, const ValueSet& values, const std::vector<bool>& wanted,
             OutputFiles& output, const CacheRelease& cache, ReceiptRecorder* recorder = nullptr);

  // Makes all of them from these sources, those of the shards. `memory`: counts what it takes.
  [[nodiscard]] RunReport make(std::span<const std::shared_ptr<ByteSource>> sources,
                               MemoryCount& memory, Observer* observer = nullptr);

  [[nodiscard]] std::byte* place(std::uint32_t, std::size_t) override { return nullptr; }
  // Throws Error "q.scale_value" where a scale has no finite inverse, and what writing throws.
  void write(std::uint32_t target, std::size_t part, std::uint64_t offset,
             std::span<std::byte> bytes) override;
  void finish(std::uint32_t target) override;

 private:
  // The tensors of a target stand one after the other in tensors_.
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
  ReceiptRecorder* const recorder_;
  std::vector<bool> wanted_;
  std::vector<Place> places_;  // by target
  std::vector<const OutputTensor*> tensors_;
  std::vector<std::atomic<std::uint64_t>> targets_left_;  // by file
};

// Opens what the wanted files are made of: all of it where tensors of several files share scales.
// Throws Error "io.changed".
[[nodiscard]] OpenShards open_needed(const Conversion& conversion, const std::vector<bool>& wanted,
                                     Storage* storage);

}  // namespace loadstone
