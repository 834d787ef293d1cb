// One thread of a conversion: it pulls windows of the output's tensors and writes them to their
// places.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "convert/output.h"
#include "convert/windows.h"
#include "execute/value_reader.h"
#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

// What all threads share.
struct Work {
  const Conversion& conversion;
  const std::vector<std::shared_ptr<ByteSource>>& sources;
  Output& output;
  WindowQueue& queue;
  std::atomic<bool>& stop;
  std::atomic<std::uint64_t> bytes_done = 0;
  std::atomic<std::uint64_t> bytes_read = 0;
  std::atomic<std::uint64_t> staging_bytes = 0;
};

// One thread's part: window after window. Not thread-safe.
class Puller {
 public:
  explicit Puller(Work& work);

  void run();

 private:
  void write(const Window& window);

  static constexpr std::uint32_t none = UINT32_MAX;

  Work& work_;
  ValueReader reader_;
  AnonymousMemory buffer_;
  std::uint32_t open_ = none;
  std::uint64_t window_bytes_peak_ = 0;
};

}  // namespace loadstone
