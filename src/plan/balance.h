// Computes a device for each module from sizes and capacities, with the same results as
// accelerate's infer_auto_device_map: modules are placed in order and split if they do not fit,
// modules that share a tensor stay together, and the first accelerator and the host reserve space
// for the largest layer that may be loaded from a slower device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loadstone/plan.h"

namespace loadstone {

// A tensor to place. A tie uses no additional memory.
struct Placeable {
  std::string_view name;
  std::uint64_t bytes = 0;
  std::size_t root = 0;  // index of the tensor to which this one is tied, or its own index
};

// The tree of a model's modules, derived from the dots in tensor names. Immutable after
// construction. Holds views of the names, which must outlive it.
class ModuleTree {
 public:
  struct Node {
    std::string_view path;
    std::vector<std::uint32_t> modules;  // child modules, in the order of their first tensors
    std::vector<std::uint32_t> tensors;  // tensors that belong directly to this module
    std::uint64_t bytes = 0;
    std::uint64_t direct_bytes = 0;     // bytes of `tensors`
    std::uint32_t tensor = UINT32_MAX;  // index, if the node is a tensor

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

// Returns one device for each tensor: "disk" for a tensor that fits on no other device.
[[nodiscard]] std::vector<std::string> balanced_devices(const std::vector<Placeable>& tensors,
                                                        DeviceMapMode mode, Capacities capacities,
                                                        const std::vector<std::string>& no_split);

// Returns the outermost modules whose name is a number, which are usually layers. A module that
// takes more than half of every device except "disk" is too large to stay whole, because some
// devices reserve space for the largest layer; its own numbered modules are used instead.
[[nodiscard]] std::vector<std::string> numbered_modules(const std::vector<Placeable>& tensors,
                                                        const Capacities& capacities);

// Returns the shortest list of module paths equivalent to one device per tensor.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> device_map_entries(
    const std::vector<Placeable>& tensors, const std::vector<std::string>& devices);

// Returns true if `path` is `name` or one of its ancestors: "a" and "a.b" are ancestors of "a.b.c"
// and "a.b[0]". The path "" is an ancestor of every name.
[[nodiscard]] bool is_path_of(std::string_view path, std::string_view name) noexcept;

// Returns the length of the parent path of `name`, or npos if `name` has no parent.
[[nodiscard]] std::size_t parent_end(std::string_view name) noexcept;

}  // namespace loadstone
