// One thread of the engine: it takes windows of values and brings them to their sink.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "boxes/value.h"
#include "engine/limits.h"
#include "engine/memory_count.h"
#include "engine/merge_statistics.h"
#include "engine/overflows.h"
#include "engine/value_reader.h"
#include "engine/value_sink.h"
#include "engine/windows.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

// A number that is not finite, or not in the dtype that its encoder computes in.
struct BadNumber {
  std::uint64_t element = 0;
  std::string code{};
  std::string message{};
};

// Everything that the threads share.
struct WindowWork {
  const ValueSet& values;
  std::span<const std::shared_ptr<ByteSource>> shards;  // null where nothing is read from
  const Budget& budget;
  ValueSink& sink;
  WindowQueue& queue;
  MemoryCount& memory;
  std::atomic<bool>& stop;
  Overflows& overflows;
  // A cast of numbers that are too large is an error, unless the plan allows it. A load warns.
  bool refuses_casts = false;
  std::atomic<std::uint64_t> bytes_done = 0;  // of WindowQueue::bytes_total()
  std::atomic<std::uint64_t> bytes_read = 0;
  MergeStatistics statistics{};
  std::mutex mutex{};
  // By target: the first number that cannot be quantized. Guarded by mutex.
  std::map<std::uint32_t, BadNumber> bad_numbers{};
};

// Window after window, until there are none or the work is stopped. Called once by each thread.
// Throws Error that names file, tensor and offset.
void make_windows(WindowWork& work);

// After all threads have ended: values with numbers that are not finite, or become so.
[[nodiscard]] std::vector<Finding> findings_of(const WindowWork& work);

}  // namespace loadstone
