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

void compare(std::vector<Finding>& findings, std::uint64_t needed,
             const std::optional<std::uint64_t>& available, Finding finding) {
  if (!available || needed <= *available) return;
  finding.severity = Severity::error;
  finding.found = human_bytes(*available);
  finding.expected = human_bytes(needed);
  findings.push_back(std::move(finding));
}

}  // namespace

std::vector<Finding> machine_findings(const Plan& plan, std::uint64_t memory_bytes) {
  return only_errors([&] {
    std::vector<Finding> findings;
    if (memory_bytes > 0) {
      compare(findings, memory_bytes, available_memory_bytes(),
              {.code = "memory.host",
               .message = "the load needs more memory than this machine has free",
               .suggestion = "free memory, place modules on disk or on another device, or choose a "
                             "smaller dtype"});
    }
    if (plan.bytes_to_write > 0 && !plan.offload_folder.empty()) {
      WritableStorage& storage = plan.catalog->storage().writable();
      compare(findings, plan.bytes_to_write, free_disk_bytes(storage, plan.offload_folder),
              {.code = "io.no_space",
               .message = fmt::format(
                   "the disk of the offload folder '{}' does not have enough free space for "
                   "the tensors that are placed on disk",
                   printable(plan.offload_folder, 400)),
               .suggestion = "free space, or choose an offload folder on another disk"});
    }
    return findings;
  });
}

}  // namespace loadstone
