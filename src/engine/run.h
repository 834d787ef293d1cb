// Runs the engine: reads values and writes them to a sink. A load, a conversion and an offload are
// one run each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "codec/decode.h"
#include "engine/groups.h"
#include "engine/limits.h"
#include "engine/memory_count.h"
#include "engine/reader_growth.h"
#include "engine/value_sink.h"
#include "loadstone/finding.h"
#include "loadstone/observer.h"
#include "loadstone/storage.h"

namespace loadstone {

// The values to make, their sources and their sink. All objects that it refers to must outlive the
// run.
struct Run {
  const ValueSet& values;
  std::span<const std::shared_ptr<ByteSource>> shards;  // null if not read
  const Budget& budget;
  // Host memory of each value that is read in file order. Null if the value is not in this run.
  std::span<std::byte* const> whole{};
  std::span<const PreparedDecoder> forms{};  // index: decoding; for values in `whole`
  // Values that are made window by window, and their destinations.
  const GroupList& groups;
  ValueSink& sink;
  MemoryCount& memory;
  Observer* observer = nullptr;
  std::atomic<bool>* stop = nullptr;  // set if the run ends early; null: not shared
  std::uint64_t read_ahead_bytes = defaults::read_ahead_bytes;
  // If true, a cast that overflows is an error unless `values` permit it. If false, it is a
  // warning.
  bool refuses_casts = false;
  bool is_fresh = true;      // the memory of `whole` should be populated before it is written
  bool interleaves = false;  // distribute fresh memory over the machine's NUMA nodes
};

struct RunReport {
  std::vector<std::uint64_t> written;  // bytes written to each value in `whole`
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_read_ahead = 0;
  std::uint64_t bytes_done = 0;  // as reported to the observer
  unsigned readers = 0;
  bool is_interleaved = false;
  std::vector<Finding> findings;  // values that are non-finite, or overflowed
};

// Prepares the decodings. This is the last check before memory is written, like check_box(). Throws
// Error "plan.box" for a decoding that does not fit.
[[nodiscard]] std::vector<PreparedDecoder> prepare_decodings(const ValueSet& values);

// Makes the values, with as many threads as `growth` allows. Rethrows the first failure of a
// thread, with the file, tensor and offset. Throws Error "plan.box" for boxes that do not fit,
// before any byte is written, and "cancelled" if the observer cancels.
[[nodiscard]] RunReport run(const Run& run, ReaderGrowth growth);

}  // namespace loadstone
