#include "cli/machine.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

namespace loadstone::cli {

std::string host_name() {
  std::array<char, 256> name = {};  // the last byte stays NUL
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
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

}  // namespace loadstone::cli
