// The receipt of a load.
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

// A target that equals a whole tensor of a file has that tensor's digest. Others are hashed while
// they are made; transposed values and values on devices are read again at the end.
class LoadReceipt : public ReceiptRecorder {
 public:
  // Watches the sink. All must live as long.
  LoadReceipt(const Plan& plan, const ValueSet& values, const OpenShards& shards, MemorySink& sink,
              DigestKind kind);

  // Call it after the readers have ended; it starts `threads` new ones. `storage` reads configs.
  // `bytes_done`: the observer's last figure. Throws Error "cancelled".
  [[nodiscard]] std::shared_ptr<const Receipt> finish(Storage& storage, unsigned threads,
                                                      Observer* observer, std::uint64_t bytes_done);

 private:
  void add_outputs(const Plan& plan, std::uint32_t target);

  const Catalog& catalog_;
  MemorySink& sink_;
  std::vector<ReceiptTensor> outputs_;
  std::vector<std::pair<std::uint32_t, std::size_t>> parts_;  // of targets, by output
  std::vector<std::size_t> first_output_;                     // by target
};

}  // namespace loadstone
