// The modules of a model, as the dots in its tensors' names tell them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/balance.h"

namespace loadstone {

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

}  // namespace loadstone
