#include "load/absent_devices.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "device/cuda_driver.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

std::optional<CudaDriver> open_driver() {
  try {
    return std::optional<CudaDriver>(std::in_place, "libcuda.so.1");
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<Finding> absent_devices(const Plan& plan) {
  std::set<std::string> names;
  for (const PlannedTarget& target : plan.targets) {
    if (target.device.starts_with("cuda")) names.insert(target.device);
  }
  if (names.empty()) return std::nullopt;
  const auto driver = open_driver();
  std::vector<std::string> absent;
  std::ranges::copy_if(names, std::back_inserter(absent), [&](const std::string& name) {
    int ordinal = 0;  // of "cuda"
    const std::size_t begin = std::min(name.find(':'), name.size() - 1) + 1;
    std::from_chars(name.data() + begin, name.data() + name.size(), ordinal);
    CUdevice device = 0;
    return !driver || driver->cuDeviceGet(&device, ordinal) != cuda::success;
  });
  if (absent.empty()) return std::nullopt;
  return Finding{.severity = Severity::warning,
                 .code = "plan.device_absent",
                 .sources = absent,
                 .message = fmt::format("this machine does not have {}, on which the plan places "
                                        "tensors",
                                        name_list(absent)),
                 .suggestion = "if the plan is not for a different machine, choose other devices"};
}

}  // namespace loadstone
