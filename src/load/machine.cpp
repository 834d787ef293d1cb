#include "loadstone/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "catalog/paths.h"
#include "loadstone/catalog.h"
#include "loadstone/storage.h"

namespace loadstone {

namespace {

std::optional<std::uint64_t> number_in(std::string_view text) {
  const auto begin = text.find_first_of("0123456789");
  if (begin == std::string_view::npos) return std::nullopt;
  std::uint64_t number = 0;
  const auto [end, problem] =
      std::from_chars(text.data() + begin, text.data() + text.size(), number);
  return problem == std::errc{} ? std::optional(number) : std::nullopt;
}

// Returns the number that follows `key` at the start of a line.
std::optional<std::uint64_t> number_of(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) return number_in(std::string_view(line).substr(key.size()));
  }
  return std::nullopt;
}

// Files of a memory control group (cgroup) in version 1 or 2 of the kernel's interface.
struct GroupFiles {
  const char* folder;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // key in memory.stat
};

constexpr GroupFiles version_2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                  "inactive_file "};
constexpr GroupFiles version_1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                  "memory.usage_in_bytes", "total_inactive_file "};

// Returns the memory that the group may still use; nullopt if the group has no limit or does not
// exist.
std::optional<std::uint64_t> left_in_group(const GroupFiles& files, const std::string& group) {
  const std::string folder = files.folder + group + "/";
  const auto limit = number_of(folder + files.limit, "");
  if (!limit) return std::nullopt;
  const auto usage = number_of(folder + files.usage, "").value_or(0);
  const auto cached = number_of(folder + "memory.stat", files.reclaimable).value_or(0);
  const auto held = usage - std::min(usage, cached);
  return *limit - std::min(*limit, held);
}

// Returns the minimum over the group and its parent groups. In a container the group's own path is
// often not visible; the root of the mount is then the container's group.
std::optional<std::uint64_t> left_in_groups(const GroupFiles& files, std::string group) {
  std::optional<std::uint64_t> least;
  for (;;) {
    if (group == "/") group.clear();
    if (const auto left = left_in_group(files, group)) {
      least = std::min(least.value_or(*left), *left);
    }
    if (group.empty()) return least;
    group.erase(std::min(group.rfind('/'), group.size()));
  }
}

std::optional<std::uint64_t> left_in_control_group() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos || line.find("/..") != std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      if (const auto left = left_in_groups(version_2, group)) return left;
    } else if (controllers.find(",memory,") != std::string::npos) {
      return left_in_groups(version_1, group);
    }
  }
  return std::nullopt;
}

std::uint64_t kilobytes(std::string_view line, std::string_view key) {
  return line.starts_with(key) ? number_in(line.substr(key.size())).value_or(0) * 1024 : 0;
}

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

std::optional<std::uint64_t> available_memory_bytes() {
  const auto kernel = number_of("/proc/meminfo", "MemAvailable:");
  const auto group = left_in_control_group();
  if (!kernel) return group;
  const std::uint64_t bytes = *kernel * 1024;
  return group ? std::min(bytes, *group) : bytes;
}

ProcessMemory process_memory() {
  ProcessMemory memory;
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    memory.peak_bytes += kilobytes(line, "VmHWM:");
    memory.anonymous_bytes += kilobytes(line, "RssAnon:");
    memory.file_bytes += kilobytes(line, "RssFile:");
  }
  return memory;
}

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
               .message = fmt::format("the disk of the offload folder '{}' has too little room for "
                                      "the tensors that are placed on disk",
                                      printable(plan.offload_folder, 400)),
               .suggestion = "free space, or choose an offload folder on another disk"});
    }
    return findings;
  });
}

}  // namespace loadstone
