// A device for each module, worked out from sizes and capacities, with the choices that
// accelerate's infer_auto_device_map makes: modules are taken in order and split where they do not
// fit, modules that share a tensor go together, and the first accelerator and the host keep room
// for the largest layer that may have to come back from a slower place.
#pragma once

#include <cstddef>
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

// The modules of a model, taken from the dots in its tensors' names.
// Immutable once made; holds views into the names.
class ModuleTree {
 public:
  struct Node {
    std::string_view path;
    std::vector<std::uint32_t> modules;  // nodes, in the order of their first tensor
    std::vector<std::uint32_t> tensors;  // nodes too, those directly in here
    std::uint64_t bytes = 0;
    std::uint64_t direct_bytes = 0;     // of `tensors`
    std::uint32_t tensor = UINT32_MAX;  // index, where the node is a tensor

    [[nodiscard]] bool is_tensor() const noexcept { return tensor != UINT32_MAX; }
  };

  explicit ModuleTree(const std::vector<Placeable>& tensors);

  [[nodiscard]] const Node& operator[](std::uint32_t node) const { return nodes_[node]; }
  [[nodiscard]] const Node& root() const { return nodes_[0]; }
  [[nodiscard]] std::size_t size() const noexcept { return nodes_.size(); }

 private:
  std::vector<Node> nodes_;
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
