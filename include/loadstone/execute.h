// Executes a plan: one pass over the shards in file order, directly into the final memory.
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
#include "loadstone/finding.h"
#include "loadstone/observer.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"

namespace loadstone {

enum class MemoryKind : std::uint8_t { host, device };

// Memory for a target's value. Owned by the caller, contiguous, row-major.
struct Destination {
  std::byte* data = nullptr;  // null: this call of execute() does not load the target
  std::uint64_t byte_count = 0;
  Dtype dtype = Dtype::u8;
  // Memory for the components of a quantized target, in the order of quantized_parts(); `data` is
  // then null. If `data` is null and `parts` is empty, the call does not load the target.
  std::vector<std::span<std::byte>> parts{};
  // `device`: memory of the target's device in the plan, which receives copies. `host`: memory of
  // this machine, even if the plan places the target on a device.
  MemoryKind kind = MemoryKind::host;
};

// Allocates a destination for each target with Delivery::memory. A page takes memory only when it
// is first written to. Movable; thread-safe while no thread writes to the memory.
class LOADSTONE_API HostMemory {
 public:
  // Throws Error "memory.host".
  explicit HostMemory(const Plan& plan);
  HostMemory(HostMemory&&) noexcept;
  HostMemory& operator=(HostMemory&&) noexcept;
  ~HostMemory();

  // Returns the destinations in the order of plan.targets; `data` is null for targets with another
  // delivery. A tie has the memory of the target that it is tied to. The memory lives as long as
  // this object.
  [[nodiscard]] const std::vector<Destination>& destinations() const noexcept;
  // Returns the destination of a target, or null if the plan has no such target.
  [[nodiscard]] const Destination* find(std::string_view target) const noexcept;

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

// Memory of the targets with Delivery::file_view (PlanOptions::mmap): their bytes in the shards,
// which are mapped privately, so that writes never reach the file. The files must not change while
// this object lives: changes may become visible, and access beyond the end of a truncated file
// kills the process. Movable; thread-safe while no thread writes to the memory.
class LOADSTONE_API FileViews {
 public:
  // Maps each shard once. Throws Error "io.changed" if a shard is not the planned one, and
  // "memory.host" if it cannot be mapped.
  explicit FileViews(const Plan& plan);
  FileViews(FileViews&&) noexcept;
  FileViews& operator=(FileViews&&) noexcept;
  ~FileViews();

  // Returns the views in the order of plan.targets; a view is empty for a target with another
  // delivery. A tie has the memory of its root.
  [[nodiscard]] const std::vector<std::span<std::byte>>& targets() const noexcept;

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

struct ExecuteOptions {
  // Number of threads that read. 0: few at first, then more while that makes the load faster, at
  // most Plan::threads.
  unsigned threads = 0;
  // Bytes per read; less if staging_bytes_max requires it.
  std::uint64_t chunk_bytes = defaults::chunk_bytes;
  // The pages of the destinations already exist, as in a model in use. If false, the load populates
  // new memory in advance, which is faster than a page fault on each first write.
  bool has_pages = false;
  // Distance in bytes ahead of the readers over which loadstone asks the system to prefetch data
  // that the page cache lacks; 0: never.
  std::uint64_t read_ahead_bytes = defaults::read_ahead_bytes;
  // Spread host memory that the load touches first over all memory nodes (NUMA) of the machine.
  // Useful if threads of all nodes read the model.
  bool interleave = false;
  Storage* storage = nullptr;  // null: the catalog's storage
  // Copies to destinations of MemoryKind::device. Null: the load calls open_cuda() if there are
  // such destinations.
  Device* device = nullptr;
  Observer* observer = nullptr;  // not owned
  // Do not commit the offload folder; the owner of Report::offload commits it.
  bool holds_offload = false;
  // A file that an earlier load into the same model wrote to the offload folder: this load may
  // remove the files of that load. "": none.
  std::string own_offload_file = {};
  // Make Report::receipt with digests of this kind: of sources as they are read, and of every
  // target in memory at the end. nullopt: no receipt, and no cost.
  std::optional<DigestKind> receipt = {};
  // One byte per target, owned by the caller: set to 1 before the first byte is written to the
  // target's destination. If the load fails, the memory of targets with 0 is unchanged. Null: not
  // recorded.
  std::uint8_t* begun = nullptr;
};

class OffloadFolder;  // opaque; keeps the offload files alive

struct SourceRange {
  std::string tensor;
  std::string shard;  // relative path
  std::uint64_t offset_begin = 0;
  std::uint64_t offset_end = 0;
};

// The origin and sources of a target's value, recorded when the load wrote it. Targets on disk keep
// their origin and get the reason "offloaded", because the model does not contain them.
struct Provenance {
  std::string target;
  Origin origin = Origin::excluded;
  TargetKind kind = TargetKind::parameter;
  Delivery delivery = Delivery::none;
  std::vector<SourceRange> sources;
  std::vector<std::string> merged;  // paths of the adapters that were merged into the value
  std::string device;
  Dtype dtype = Dtype::f32;
  Shape shape;
  std::string encoding;  // of a quantized value; `dtype` and shape describe the decoded values
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
  std::uint64_t bytes_read_ahead = 0;      // requested in advance: the page cache lacked them
  std::uint64_t staging_bytes_peak = 0;    // measured
  unsigned readers = 0;                    // number of reader threads at the end
  bool is_interleaved = false;             // requested, and the system allowed it
  double sync_seconds = 0;                 // part of `seconds`: flushing offload files to disk
  std::shared_ptr<OffloadFolder> offload;  // only with ExecuteOptions::holds_offload
  std::shared_ptr<const Receipt> receipt;  // only with ExecuteOptions::receipt
};

// Loads a plan into `destinations`, one per target. Before it reads a data byte, throws Error
// "io.changed" if a shard is not the planned one, an error for a destination of the wrong size or
// dtype, and the first error among the findings. Also writes values of the origins zeros and
// constant; constructor and initialiser values are the caller's task. On the first failure
// loadstone cancels the other work and removes the files that it wrote to the offload folder. The
// Error names file, tensor and offset, or tensor and device. When this returns or throws, no copy
// is in flight.
//
// A finite value that is too large for its target's dtype becomes infinite: Report::findings then
// contains warning finding "convert.overflow" for the target.
LOADSTONE_API Report execute(const Plan& plan, std::span<const Destination> destinations,
                             const ExecuteOptions& options = {});

[[nodiscard]] LOADSTONE_API std::string to_json(const Report& report);

// Compares a plan with this machine as it is now: error "memory.host" if the load would allocate
// more than the free memory, error "io.no_space" if the disk of the offload folder has too little
// room. Figures that the system does not report are not compared. A saved plan does not contain
// these findings.
// `memory_bytes`: host memory that the load will allocate.
// `limit`: replaces the free memory.
[[nodiscard]] LOADSTONE_API std::vector<Finding> machine_findings(
    const Plan& plan, std::uint64_t memory_bytes, std::optional<std::uint64_t> limit = {});

}  // namespace loadstone
