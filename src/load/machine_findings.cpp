#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/only_errors.h"
#include "base/text.h"
#include "catalog/paths.h"
#include "loadstone/catalog.h"
#include "loadstone/execute.h"
#include "loadstone/machine.h"
#include "loadstone/storage.h"
#include "storage/disk_space.h"

namespace loadstone {

namespace {

// Returns the free bytes of the disk that the folder is on, or will be.
std::optional<std::uint64_t> free_disk_bytes(WritableStorage& storage, std::string folder) {
  folder = storage.real_path(folder);
  while (!storage.status(folder, true) && parent_path(folder) != folder) {
    folder = parent_path(folder);
  }
  return storage.free_bytes(folder);
}

}  // namespace

std::vector<Finding> machine_findings(const Plan& plan, std::uint64_t memory_bytes,
                                      std::optional<std::uint64_t> limit) {
  return only_errors([&] {
    std::vector<Finding> findings;
    const auto available = limit ? limit : available_memory_bytes();
    if (available && memory_bytes > *available) {
      findings.push_back(
          {.severity = Severity::error,
           .code = "memory.host",
           .message =
               fmt::format("the load needs {} of memory, but only {} {}", human_bytes(memory_bytes),
                           human_bytes(*available), limit ? "are allowed" : "are free"),
           .suggestion = "free memory, place modules on disk or on another device, choose a "
                         "smaller dtype, or allow more: max_memory={'cpu': SIZE}, --max-memory "
                         "cpu=SIZE (or unlimited)",
           .found = human_bytes(*available),
           .expected = human_bytes(memory_bytes)});
    }
    if (plan.bytes_to_write == 0 || plan.offload_folder.empty()) return findings;
    WritableStorage& storage = plan.catalog->storage().writable();
    const auto free = free_disk_bytes(storage, plan.offload_folder);
    if (auto finding =
            space_finding("the offload folder", plan.offload_folder, plan.bytes_to_write, free)) {
      findings.push_back(*std::move(finding));
    }
    return findings;
  });
}

}  // namespace loadstone
