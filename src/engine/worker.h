// Runs one thread of the engine, which makes windows of values and writes them to the sink.
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

// An element that is non-finite, or too large for the dtype in which its encoder computes.
struct BadNumber {
  std::uint64_t element = 0;
  std::string code{};
  std::string message{};
};

// State that all threads share.
struct WindowWork {
  const Run& run;
  ReadContext& reads;  // shards and counters of the same run
  WindowQueue& queue;
  MergeStatistics statistics{};
  std::mutex mutex{};
  // For each value, by its index, the first element that cannot be quantized. Guarded by `mutex`.
  std::map<std::uint32_t, BadNumber> bad_numbers{};
};

// Makes windows until all are done or the run is stopped. Each thread calls it once. Throws Error
// that names the file, tensor and offset.
void make_windows(WindowWork& work);

// Returns findings for values with elements that are non-finite before or after the cast. Call
// after all threads have ended.
[[nodiscard]] std::vector<Finding> findings_of(const WindowWork& work);

}  // namespace loadstone
