#include "loadstone/machine.h"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

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

// Returns the address space that the process may still use; nullopt without a limit (ulimit -v).
std::optional<std::uint64_t> left_of_address_space() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  const std::uint64_t used = number_of("/proc/self/status", "VmSize:").value_or(0) * 1024;
  return limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, used);
}

std::uint64_t kilobytes(std::string_view line, std::string_view key) {
  return line.starts_with(key) ? number_in(line.substr(key.size())).value_or(0) * 1024 : 0;
}

}  // namespace

std::optional<std::uint64_t> available_memory_bytes() {
  auto least = number_of("/proc/meminfo", "MemAvailable:");
  if (least) *least *= 1024;
  for (const auto& left : {left_in_control_group(), left_of_address_space()}) {
    if (left) least = std::min(least.value_or(*left), *left);
  }
  return least;
}

std::optional<std::uint64_t> mappable_memory_bytes() {
  constexpr std::uint64_t reserve_bytes_min = std::uint64_t{1} << 30;
  const auto available = available_memory_bytes();
  if (!available) return std::nullopt;
  return *available - std::min(*available, std::max(reserve_bytes_min, *available / 20));
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

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    // ARM has no "model name".
    if (!line.starts_with("model name") && !line.starts_with("CPU part")) continue;
    return line.substr(std::min(line.find(": ") + 2, line.size()));
  }
  return {};
}

}  // namespace loadstone
