// One thread of the engine: it takes windows of values and brings them to their sink.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/merge_statistics.h"
#include "engine/reader.h"
#include "engine/run.h"
#include "engine/windows.h"
#include "loadstone/finding.h"

namespace loadstone {

// A number that is not finite, or not in the dtype that its encoder computes in.
struct BadNumber {
  std::uint64_t element = 0;
  std::string code{};
  std::string message{};
};

// Everything that the threads share.
struct WindowWork {
  const Run& run;
  ReadContext& reads;  // of the same run: its shards and counts
  WindowQueue& queue;
  MergeStatistics statistics{};
  std::mutex mutex{};
  // By value: the first number that cannot be quantized. Guarded by mutex.
  std::map<std::uint32_t, BadNumber> bad_numbers{};
};

// Window after window, until all are made or the work is stopped. Called once by each thread.
// Throws Error that names file, tensor and offset.
void make_windows(WindowWork& work);

// Call after all threads have ended: values with non-finite numbers, before or after the cast.
[[nodiscard]] std::vector<Finding> findings_of(const WindowWork& work);

}  // namespace loadstone
