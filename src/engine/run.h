// One run of the engine: values in, a sink out. A load, a conversion and an offload are each one.
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

// The values to make, their sources and their sink. Everything it refers to must outlive the run.
struct Run {
  const ValueSet& values;
  std::span<const std::shared_ptr<ByteSource>> shards;  // null if not read
  const Budget& budget;
  // Host memory of values that are read in the order of the files, by value; null: not in this run.
  std::span<std::byte* const> whole{};
  std::span<const PreparedDecoder> forms{};  // by decoding: for values in `whole`
  // The values that are made window by window, with their destinations.
  const GroupList& groups;
  ValueSink& sink;
  MemoryCount& memory;
  Observer* observer = nullptr;
  std::atomic<bool>* stop = nullptr;  // set if the run ends early; null: not shared
  std::uint64_t read_ahead_bytes = defaults::read_ahead_bytes;
  // A cast of values that are too large is an error, unless `values` allow it. Else a warning.
  bool refuses_casts = false;
  bool is_fresh = true;      // the memory of `whole` must be populated before it is written
  bool interleaves = false;  // fresh memory over the nodes of the machine
};

struct RunReport {
  std::vector<std::uint64_t> written;  // bytes of values in `whole`, by value
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_read_ahead = 0;
  std::uint64_t bytes_done = 0;  // the observer's figure
  unsigned readers = 0;
  bool is_interleaved = false;
  std::vector<Finding> findings;  // values that are not finite, or became so
};

// Prepares the decodings, the last place before memory is written: see check_box(). Throws Error
// "plan.box" for one that does not fit.
[[nodiscard]] std::vector<PreparedDecoder> prepare_decodings(const ValueSet& values);

// Makes the values, with as many threads as `growth` allows. Throws the first failure of a thread,
// with file, tensor and offset; Error "plan.box" for boxes that do not fit, before anything is
// written; "cancelled" if the observer cancels.
[[nodiscard]] RunReport run(const Run& run, ReaderGrowth growth);

}  // namespace loadstone
