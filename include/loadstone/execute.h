// Carrying a plan out: one pass over the shards in file order, straight into the final memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/device.h"
#include "loadstone/export.h"
#include "loadstone/observer.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"

namespace loadstone {

enum class MemoryKind : std::uint8_t { host, device };

// Memory that a target's value is written to. Owned by the caller, contiguous, row-major.
struct Destination {
  std::byte* data = nullptr;  // null: this target is not loaded in this call
  std::uint64_t byte_count = 0;
  Dtype dtype = Dtype::u8;
  // Memory of a quantized target's components, in the order of quantized_parts(); `data` is null
  // then. None: this target is not loaded in this call.
  std::vector<std::span<std::byte>> parts;
  // The target's device as the plan names it, to which bytes are copied; or the host, whatever the
  // plan names.
  MemoryKind kind = MemoryKind::host;
};

// One destination for each target of the plan with Delivery::memory, fresh memory of this process
// that costs nothing until it is written to. Movable; thread-safe while nobody writes to the
// memory.
class LOADSTONE_API HostMemory {
 public:
  // Throws Error "memory.host".
  explicit HostMemory(const Plan& plan);
  HostMemory(HostMemory&&) noexcept;
  HostMemory& operator=(HostMemory&&) noexcept;
  ~HostMemory();

  // In the order of plan.targets; null data where nothing is delivered to memory. A tie shows the
  // memory of the target that it is tied to. The memory lives as long as this.
  [[nodiscard]] const std::vector<Destination>& destinations() const noexcept;
  // The one of a target; null where the plan has no such target.
  [[nodiscard]] const Destination* find(std::string_view target) const noexcept;

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

// Memory for the targets with Delivery::file_view (PlanOptions::mmap), as HostMemory is for the
// others: their bytes in shards that are mapped privately, so that writing to them never reaches
// the file. The files must stay as they are while this lives: what others change in them may show,
// and what they cut off ends the process. Movable; thread-safe while nobody writes to the memory.
class LOADSTONE_API FileViews {
 public:
  // Maps each shard once. Throws Error "io.changed" where one is no more what the plan was made
  // for, and "memory.host".
  explicit FileViews(const Plan& plan);
  FileViews(FileViews&&) noexcept;
  FileViews& operator=(FileViews&&) noexcept;
  ~FileViews();

  // In the order of plan.targets; empty for what is no view. A tie shows what it is tied to.
  [[nodiscard]] const std::vector<std::span<std::byte>>& targets() const noexcept;

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

struct ExecuteOptions {
  // Readers. 0: few at first, then more while that makes the load faster, at most Plan::threads.
  unsigned threads = 0;
  // One read; smaller where staging_bytes_max demands it.
  std::uint64_t chunk_bytes = defaults::chunk_bytes;
  // Destinations have their pages already, as those of a model in use; new memory gets them faster
  // in advance than at the first write.
  bool has_pages = false;
  // How far ahead of the readers the system is asked for bytes that its page cache lacks; 0: never.
  std::uint64_t read_ahead_bytes = defaults::read_ahead_bytes;
  // Memory of the host that the load is the first to touch comes from all memory nodes of the
  // machine in turns, which is of use where threads of all nodes read it.
  bool interleave = false;
  Storage* storage = nullptr;  // null: the catalog's
  // Copies to destinations of MemoryKind::device. Null: open_cuda(), where there are any.
  Device* device = nullptr;
  Observer* observer = nullptr;  // not owned
  // What goes to the offload folder is not committed: that is left to the holder of
  // Report::offload.
  bool holds_offload = false;
  // Report::receipt is made: sources as they are read, and every target as it stands in memory at
  // the end. None: it costs nothing.
  std::optional<DigestKind> receipt = {};
  // One byte for each target, not owned: 1 from before the first byte is written to its destination
  // on. If the load fails, the memory of the others is as it was. Null: it costs nothing.
  std::uint8_t* begun = nullptr;
};

class OffloadFolder;  // none of the interface: who holds it keeps the folder's files

struct SourceRange {
  std::string tensor;
  std::string shard;  // relative path
  std::uint64_t offset_begin = 0;
  std::uint64_t offset_end = 0;
};

// Where a target's value came from, written down when it got there. What was placed on disk keeps
// its origin and has the reason "offloaded": the model does not hold it.
struct Provenance {
  std::string target;
  Origin origin = Origin::excluded;
  TargetKind kind = TargetKind::parameter;
  Delivery delivery = Delivery::none;
  std::vector<SourceRange> sources;
  std::vector<std::string> merged;  // roots of the adapters that are merged into it
  std::string device;
  Dtype dtype = Dtype::f32;
  Shape shape;
  std::string encoding;  // of a quantized value; dtype and shape are those of its numbers
  std::string tie_of;
  std::string reason;
  std::uint64_t bytes_written = 0;
};

struct Report {
  std::vector<Provenance> provenance;  // in the order of plan.targets
  std::vector<Finding> findings;
  double seconds = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;         // into destinations and offload files
  std::uint64_t bytes_read_ahead = 0;      // that the page cache lacked, and was asked for
  std::uint64_t staging_bytes_peak = 0;    // counted, not estimated
  unsigned readers = 0;                    // at the end
  bool is_interleaved = false;             // as asked for, and the system let it
  double sync_seconds = 0;                 // of `seconds`: bringing offload files to the disk
  std::shared_ptr<OffloadFolder> offload;  // only with ExecuteOptions::holds_offload
  std::shared_ptr<const Receipt> receipt;  // only with ExecuteOptions::receipt
};

// Checks first (errors among the findings: Error of the first, before a data byte is read; shards
// still the planned ones: else "io.changed"; destinations of the right size and dtype), then loads
// into `destinations` (one per target of the plan). Origins zeros and constant are written too;
// constructor and initialiser values are the caller's. On the first failure the rest is cancelled,
// files written to the offload folder are removed, and the Error names file, tensor and offset, or
// tensor and device. No copy is under way any longer when this returns or throws.
LOADSTONE_API Report execute(const Plan& plan, std::span<const Destination> destinations,
                             const ExecuteOptions& options = {});

[[nodiscard]] LOADSTONE_API std::string to_json(const Report& report);

}  // namespace loadstone
