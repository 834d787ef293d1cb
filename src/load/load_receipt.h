// Makes the receipt of a load.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "load/memory_sink.h"
#include "loadstone/execute.h"
#include "loadstone/observer.h"
#include "receipt/recorder.h"

namespace loadstone {

// Computes digests of the targets. A target that equals a whole tensor of a file has the digest of
// that tensor. Other targets are hashed while they are made, except transposed values and values on
// devices, which are read again at the end.
class LoadReceipt : public ReceiptRecorder {
 public:
  // Starts to watch the sink. All arguments must outlive this object.
  LoadReceipt(const Plan& plan, const ValueSet& values, const OpenShards& shards, MemorySink& sink,
              DigestKind kind);

  // Call after the readers have ended. Hashes the remaining targets in `threads` new threads.
  // `storage` reads configs. `bytes_done` is the last figure that the observer received. Throws
  // Error "cancelled".
  [[nodiscard]] std::shared_ptr<const Receipt> finish(Storage& storage, unsigned threads,
                                                      Observer* observer, std::uint64_t bytes_done);

 private:
  void add_outputs(const Plan& plan, std::uint32_t target);

  const Catalog& catalog_;
  MemorySink& sink_;
  std::vector<ReceiptTensor> outputs_;
  std::vector<std::pair<std::uint32_t, std::size_t>> parts_;  // (target, part) by output
  std::vector<std::size_t> first_output_;                     // by target
};

}  // namespace loadstone
