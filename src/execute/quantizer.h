// Quantizing values on their way: each in windows of whole blocks or rows, by several threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "execute/anonymous_memory.h"
#include "kernels/quantize.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone {

// All quantized targets of a load. Thread-safe.
class Quantizer {
 public:
  using Parts = std::vector<std::byte*>;
  using Shards = std::span<const std::shared_ptr<ByteSource>>;

  // `parts`: memory for each target of the plan, in the order of quantized_parts(); empty: not in
  // this call. `thread_bytes`: what one thread may take for numbers and for staging. Throws Error
  // "plan.quantize" for plans that nobody checked.
  Quantizer(const Plan& plan, const std::vector<Parts>& parts, std::uint64_t thread_bytes);

  // Bytes of all numbers, and of those that are done.
  [[nodiscard]] std::uint64_t bytes_total() const noexcept { return bytes_total_; }
  [[nodiscard]] std::uint64_t bytes_done() const noexcept { return bytes_done_; }
  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return bytes_read_; }
  // Of all threads together.
  [[nodiscard]] std::uint64_t staging_bytes_peak() const noexcept { return staging_bytes_; }

  // Does windows until there are none left. Called once by each thread. Throws Error that names
  // file, tensor and offset.
  void run(Shards shards, std::atomic<bool>& stop);

  // After all threads have ended: numbers that are not finite, each value's first.
  [[nodiscard]] std::vector<Finding> findings() const;

 private:
  struct Unit {
    std::uint32_t target = 0;
    QuantizeForm form;
    Parts parts;
    std::uint64_t window = 0;  // elements
    std::uint64_t next = 0;    // element; guarded by mutex_
    AnonymousMemory scratch;   // made when the first window is taken
    std::atomic<std::uint64_t> left = 0;
    std::atomic<std::uint64_t> not_finite = UINT64_MAX;  // the first such number
  };
  struct Window {
    Unit* unit = nullptr;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  [[nodiscard]] std::uint64_t window_of(const QuantizeForm& form) const noexcept;
  [[nodiscard]] std::optional<Window> take();
  void finish(const Window& window);

  const Plan& plan_;
  std::uint64_t thread_bytes_;
  std::uint64_t window_bytes_ = 0;  // of the largest window
  std::deque<Unit> units_;          // in the order of the file
  std::mutex mutex_;
  std::size_t current_ = 0;  // guarded by mutex_
  std::uint64_t bytes_total_ = 0;
  std::atomic<std::uint64_t> bytes_done_ = 0;
  std::atomic<std::uint64_t> bytes_read_ = 0;
  std::atomic<std::uint64_t> staging_bytes_ = 0;
};

}  // namespace loadstone
