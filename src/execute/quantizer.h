// Quantizing values on their way: each in windows of whole blocks or rows, by several threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "execute/anonymous_memory.h"
#include "kernels/quantize.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone {

// All quantized targets of a load. Those with a scale for all of their numbers are measured before
// they are encoded, with all that share it; they are read twice unless they fit a thread's memory.
// Thread-safe.
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
    std::size_t group = 0;
    QuantizeForm form;
    Parts parts;
    std::uint64_t window = 0;  // elements
    AnonymousMemory scratch;   // made when the first window is taken
    std::atomic<std::uint64_t> left = 0;
    std::atomic<std::uint64_t> not_finite = UINT64_MAX;  // the first such number
  };
  // The next window of a group.
  struct Cursor {
    std::size_t unit = 0;
    std::uint64_t next = 0;  // element
  };
  // Values that share their scales, mostly one. All but the units are guarded by mutex_.
  struct Group {
    std::vector<Unit*> units;
    std::vector<float> amax;  // written no more once measure_left is 0
    std::uint64_t bytes = 0;
    bool is_measured = false;  // before it is encoded
    bool is_kept = false;      // read once, by one thread
    Cursor measured;
    Cursor encoded;
    std::uint64_t measure_left = 0;  // windows
  };
  enum class Pass : std::uint8_t { measure, encode, both };
  struct Window {
    Group* group = nullptr;
    Unit* unit = nullptr;  // null: all of the group
    Pass pass = Pass::encode;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  class Worker;

  void add_unit(std::uint32_t target, const Parts& parts,
                std::map<std::string, std::size_t>& known);
  void size_group(Group& group);
  [[nodiscard]] std::uint64_t window_of(const QuantizeForm& form) const noexcept;
  [[nodiscard]] std::optional<Window> take(const std::atomic<bool>& stop);
  [[nodiscard]] static std::optional<Window> next_of(Group& group);
  [[nodiscard]] static Window advance(Group& group, Cursor& cursor, Pass pass);
  void join(Group& group, std::span<const float> amax);
  void encode(Unit& unit, std::uint64_t begin, std::uint64_t end, const std::byte* numbers);
  void finish(Unit& unit);

  const Plan& plan_;
  std::uint64_t thread_bytes_;
  std::uint64_t window_bytes_ = 0;  // of the largest window
  std::deque<Unit> units_;          // in the order of the file
  std::deque<Group> groups_;
  std::mutex mutex_;
  std::condition_variable changed_;  // a group has been measured
  std::size_t current_ = 0;          // the first group with windows left; guarded by mutex_
  std::uint64_t bytes_total_ = 0;
  std::atomic<std::uint64_t> bytes_done_ = 0;
  std::atomic<std::uint64_t> bytes_read_ = 0;
  std::atomic<std::uint64_t> staging_bytes_ = 0;
};

}  // namespace loadstone
