// A device for each module, worked out from sizes and capacities, with the choices that
// accelerate's infer_auto_device_map makes: modules are taken in order and split where they do not
// fit, modules that share a tensor go together, and the first accelerator and the host keep room
// for the largest layer that may have to come back from a slower place.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loadstone/plan.h"

namespace loadstone {

// A tensor to place. Ties take no room of their own.
struct Placeable {
  std::string_view name;
  std::uint64_t bytes = 0;
  std::size_t root = 0;  // index of the tensor that this one is a tie of; its own otherwise
};

using Capacities = std::vector<std::pair<std::string, std::uint64_t>>;

// One device for each tensor. What fits nowhere is on "disk".
[[nodiscard]] std::vector<std::string> balanced_devices(const std::vector<Placeable>& tensors,
                                                        DeviceMapMode mode, Capacities capacities,
                                                        const std::vector<std::string>& no_split);

// The shortest list of module paths that says the same as one device for each tensor.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> device_map_entries(
    const std::vector<Placeable>& tensors, const std::vector<std::string>& devices);

// Whether `path` is the name or one of the modules around it: "a" and "a.b" are of "a.b.c" and of
// "a.b[0]", "" is of all.
[[nodiscard]] bool is_path_of(std::string_view path, std::string_view name) noexcept;

// Where the next shorter path around a name ends; npos after the shortest that is not empty.
[[nodiscard]] std::size_t parent_end(std::string_view name) noexcept;

}  // namespace loadstone
