#include "plan/balance.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <unordered_set>

#include "base/text.h"
#include "loadstone/name_hash.h"
#include "plan/devices.h"

namespace loadstone {

namespace {

constexpr std::uint64_t unlimited = UINT64_MAX;

class Balancer {
 public:
  Balancer(const std::vector<Placeable>& tensors, const ModuleTree& tree, Capacities capacities,
           const std::vector<std::string>& no_split)
      : tensors_(tensors),
        tree_(tree),
        no_split_(no_split.begin(), no_split.end()),
        devices_(std::move(capacities)),
        placed_(tensors.size()) {
    std::erase_if(devices_, [](const auto& device) { return device.first == "disk"; });
    devices_.emplace_back("disk", unlimited);
    std::map<std::size_t, std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].root != i) groups[tensors[i].root].push_back(i);
    }
    for (auto& [root, ties] : groups) {
      ties.push_back(root);
      ties_.push_back(std::move(ties));
    }
  }

  void limit(DeviceMapMode mode);
  std::vector<std::string> place();

 private:
  using NodeIndex = std::uint32_t;

  bool is_whole(const ModuleTree::Node& node) const {
    return node.modules.empty() || no_split_.contains(std::string(node.path));
  }

  std::uint64_t largest_layer(const std::deque<NodeIndex>& todo, std::set<NodeIndex>& which,
                              bool with_tensors) const;
  std::vector<NodeIndex> tied_nodes(NodeIndex node, const std::deque<NodeIndex>& todo) const;
  void put(NodeIndex node, const std::string& device);
  void split(NodeIndex node, std::deque<NodeIndex>& todo);
  bool split_tie(const std::vector<NodeIndex>& ties, std::deque<NodeIndex>& todo);
  bool keeps_room(std::size_t device) const;

  const std::vector<Placeable>& tensors_;
  const ModuleTree& tree_;
  std::unordered_set<std::string, NameHash, std::equal_to<>> no_split_;
  Capacities devices_;
  std::vector<std::vector<std::size_t>> ties_;
  std::vector<std::string> placed_;
};

// Lowers the capacities of the accelerators so that each accelerator gets about the same number of
// bytes.
void Balancer::limit(DeviceMapMode mode) {
  std::vector<std::size_t> accelerators;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (is_accelerator(devices_[i].first) && devices_[i].second > 0) accelerators.push_back(i);
  }
  if (accelerators.empty()) return;
  const bool low_first = mode == DeviceMapMode::balanced_low_0 && accelerators.size() > 1;
  std::uint64_t largest = 0;
  for (NodeIndex i = 0; i < tree_.size(); ++i) {
    const auto& node = tree_[i];
    if (node.is_tensor()) continue;
    if (i != 0) largest = std::max(largest, node.direct_bytes);
    if (no_split_.contains(std::string(node.path))) largest = std::max(largest, node.bytes);
  }
  const std::uint64_t sharers = accelerators.size() - (low_first ? 1 : 0);
  const std::uint64_t share = tree_.root().bytes / sharers + largest + largest / 4;
  // The last accelerator keeps its capacity, because the equal shares may be too small.
  for (std::size_t i = 0; i + 1 < accelerators.size(); ++i) {
    auto& capacity = devices_[accelerators[i]].second;
    if (!(low_first && i == 0)) capacity = std::min(capacity, share);
  }
  if (!low_first) return;
  std::uint64_t others = 0;
  for (std::size_t i = 1; i < accelerators.size(); ++i) {
    const std::uint64_t capacity = devices_[accelerators[i]].second;
    others = capacity > unlimited - others ? unlimited : others + capacity;
  }
  auto& first = devices_[accelerators[0]].second;
  first = std::min(first, tree_.root().bytes > others ? tree_.root().bytes - others : 0);
}

std::uint64_t Balancer::largest_layer(const std::deque<NodeIndex>& todo, std::set<NodeIndex>& which,
                                      bool with_tensors) const {
  std::uint64_t largest = 0;
  which.clear();
  std::vector<NodeIndex> stack(todo.begin(), todo.end());
  while (!stack.empty()) {
    const NodeIndex index = stack.back();
    stack.pop_back();
    const auto& node = tree_[index];
    if (node.is_tensor() && !with_tensors) continue;
    if (!node.is_tensor() && !is_whole(node)) {
      stack.insert(stack.end(), node.modules.begin(), node.modules.end());
      continue;
    }
    if (node.bytes < largest) continue;
    if (node.bytes > largest) which.clear();
    largest = node.bytes;
    which.insert(index);
  }
  return largest;
}

// Returns the unplaced nodes outside this module that share a tensor with the module.
std::vector<Balancer::NodeIndex> Balancer::tied_nodes(NodeIndex node,
                                                      const std::deque<NodeIndex>& todo) const {
  std::vector<NodeIndex> found;
  const std::string_view path = tree_[node].path;
  for (const auto& group : ties_) {
    const auto inside = [&](std::size_t i) { return is_path_of(path, tensors_[i].name); };
    if (std::ranges::none_of(group, inside)) continue;
    for (const std::size_t tensor : group) {
      if (inside(tensor)) continue;
      const auto other = std::ranges::find_if(todo, [&](NodeIndex candidate) {
        return is_path_of(tree_[candidate].path, tensors_[tensor].name);
      });
      if (other == todo.end() || std::ranges::find(found, *other) != found.end()) continue;
      found.push_back(*other);
    }
  }
  return found;
}

void Balancer::put(NodeIndex node, const std::string& device) {
  std::vector<NodeIndex> stack = {node};
  while (!stack.empty()) {
    const auto& next = tree_[stack.back()];
    stack.pop_back();
    if (next.is_tensor()) placed_[next.tensor] = device;
    stack.insert(stack.end(), next.modules.begin(), next.modules.end());
    stack.insert(stack.end(), next.tensors.begin(), next.tensors.end());
  }
}

void Balancer::split(NodeIndex node, std::deque<NodeIndex>& todo) {
  const auto& parts = tree_[node];
  todo.insert(todo.begin(), parts.modules.begin(), parts.modules.end());
  todo.insert(todo.begin(), parts.tensors.begin(), parts.tensors.end());
}

bool Balancer::split_tie(const std::vector<NodeIndex>& ties, std::deque<NodeIndex>& todo) {
  for (const NodeIndex tie : ties) {
    const auto& node = tree_[tie];
    if (node.is_tensor() || is_whole(node)) continue;
    auto at = todo.erase(std::ranges::find(todo, tie));
    at = todo.insert(at, node.modules.begin(), node.modules.end());
    todo.insert(at, node.tensors.begin(), node.tensors.end());
    return true;
  }
  return false;
}

bool Balancer::keeps_room(std::size_t device) const {
  const auto first = std::ranges::find_if(
      devices_, [](const auto& candidate) { return is_accelerator(candidate.first); });
  if (devices_[device].first == "cpu") return true;
  return first != devices_.end() && devices_[device].first == first->first;
}

std::vector<std::string> Balancer::place() {
  std::deque<NodeIndex> todo(tree_.root().modules.begin(), tree_.root().modules.end());
  todo.insert(todo.begin(), tree_.root().tensors.begin(), tree_.root().tensors.end());
  std::set<NodeIndex> largest_nodes;
  std::uint64_t largest = largest_layer(todo, largest_nodes, true);
  std::size_t device = 0;
  std::uint64_t used = 0;
  while (!todo.empty()) {
    const NodeIndex node = todo.front();
    todo.pop_front();
    std::erase_if(largest_nodes,
                  [&](NodeIndex layer) { return is_path_of(tree_[node].path, tree_[layer].path); });
    if (largest_nodes.empty()) largest = largest_layer(todo, largest_nodes, false);
    const std::uint64_t bytes = tree_[node].bytes;
    const auto ties = tied_nodes(node, todo);
    std::uint64_t bytes_with_ties = bytes;
    for (const NodeIndex tie : ties) bytes_with_ties += tree_[tie].bytes;
    const std::uint64_t room = keeps_room(device) ? largest : 0;
    const std::uint64_t capacity = devices_[device].second;
    const auto fits = [&](std::uint64_t size) {
      return capacity == unlimited ||
             (capacity >= room && capacity - room >= used && capacity - room - used >= size);
    };
    if (fits(bytes_with_ties)) {
      used += bytes_with_ties;
      put(node, devices_[device].first);
      for (const NodeIndex tie : ties) {
        put(tie, devices_[device].first);
        todo.erase(std::ranges::find(todo, tie));
      }
      continue;
    }
    if (!ties.empty() && fits(bytes) && split_tie(ties, todo)) {
      todo.push_front(node);
    } else if (!tree_[node].is_tensor() && !is_whole(tree_[node])) {
      split(node, todo);
    } else {
      todo.push_front(node);
      ++device;
      used = 0;
      continue;
    }
    largest = largest_layer(todo, largest_nodes, false);
  }
  for (std::size_t i = 0; i < placed_.size(); ++i) placed_[i] = placed_[tensors_[i].root];
  return std::move(placed_);
}

}  // namespace

std::vector<std::string> balanced_devices(const std::vector<Placeable>& tensors, DeviceMapMode mode,
                                          Capacities capacities,
                                          const std::vector<std::string>& no_split) {
  if (capacities.empty()) capacities.emplace_back("cpu", unlimited);
  const ModuleTree tree(tensors);
  Balancer balancer(tensors, tree, std::move(capacities), no_split);
  if (mode != DeviceMapMode::sequential) balancer.limit(mode);
  return balancer.place();
}

std::vector<std::string> numbered_modules(const std::vector<Placeable>& tensors,
                                          const Capacities& capacities) {
  std::uint64_t largest = capacities.empty() ? unlimited : 0;
  for (const auto& [device, bytes] : capacities) {
    if (device != "disk") largest = std::max(largest, bytes);
  }
  const ModuleTree tree(tensors);
  std::vector<std::string> paths;
  std::vector<std::uint32_t> stack = {0};
  while (!stack.empty()) {
    const auto& node = tree[stack.back()];
    stack.pop_back();
    const std::string_view name = node.path.substr(node.path.rfind('.') + 1);
    if (is_digits(name) && node.bytes <= largest / 2) {
      paths.emplace_back(node.path);
    } else {
      stack.insert(stack.end(), node.modules.begin(), node.modules.end());
    }
  }
  return paths;
}

std::vector<std::pair<std::string, std::string>> device_map_entries(
    const std::vector<Placeable>& tensors, const std::vector<std::string>& devices) {
  const ModuleTree tree(tensors);
  // Children come after their parents, so a backward pass finds the only device of each node, or
  // finds that the node has several devices.
  std::vector<const std::string*> one(tree.size(), nullptr);
  std::vector<bool> several(tree.size(), false);
  for (auto i = static_cast<std::uint32_t>(tree.size()); i-- > 0;) {
    const auto& node = tree[i];
    if (node.is_tensor()) one[i] = &devices[node.tensor];
    for (const auto* children : {&node.tensors, &node.modules}) {
      for (const std::uint32_t child : *children) {
        if (several[child] || (one[i] != nullptr && *one[i] != *one[child])) several[i] = true;
        one[i] = one[child];
      }
    }
  }
  std::vector<std::pair<std::string, std::string>> entries;
  std::vector<std::uint32_t> stack = {0};
  while (!stack.empty()) {
    const std::uint32_t i = stack.back();
    stack.pop_back();
    if (!several[i]) {
      if (one[i] != nullptr) entries.emplace_back(tree[i].path, *one[i]);
      continue;
    }
    for (const auto* children : {&tree[i].modules, &tree[i].tensors}) {
      stack.insert(stack.end(), children->rbegin(), children->rend());
    }
  }
  return entries;
}

std::size_t parent_end(std::string_view name) noexcept {
  // A bracket and all text after it are not module names: "rope.freqs[0]", "cache['a.b']".
  const auto bracket = name.find('[');
  if (bracket != std::string_view::npos) return bracket == 0 ? std::string_view::npos : bracket;
  return name.rfind('.');
}

bool is_path_of(std::string_view path, std::string_view name) noexcept {
  if (path.empty()) return true;
  if (!name.starts_with(path)) return false;
  return name.size() == path.size() || name[path.size()] == '.' || name[path.size()] == '[';
}

ModuleTree::ModuleTree(const std::vector<Placeable>& tensors) {
  NameMap<std::uint32_t> modules = {{std::string_view(), 0}};
  nodes_.emplace_back();
  std::vector<std::string_view> missing;
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    const std::string_view name = tensors[i].name;
    // Collects the enclosing modules, innermost first, up to the first module that is already
    // known.
    missing.clear();
    std::string_view path = name.substr(0, name.find('['));
    std::uint32_t parent = 0;
    for (;;) {
      const auto dot = path.rfind('.');
      path = dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
      const auto known = modules.find(path);
      if (known != modules.end()) {
        parent = known->second;
        break;
      }
      missing.push_back(path);
    }
    while (!missing.empty()) {
      const auto node = static_cast<std::uint32_t>(nodes_.size());
      nodes_.emplace_back().path = missing.back();
      modules.emplace(missing.back(), node);
      nodes_[parent].modules.push_back(node);
      parent = node;
      missing.pop_back();
    }
    const auto leaf = static_cast<std::uint32_t>(nodes_.size());
    nodes_.emplace_back();
    nodes_[leaf].path = name;
    nodes_[leaf].tensor = i;
    nodes_[leaf].bytes = tensors[i].root == i ? tensors[i].bytes : 0;
    nodes_[parent].tensors.push_back(leaf);
    nodes_[parent].direct_bytes += nodes_[leaf].bytes;
  }
  // Children come after their parents, so a backward pass adds only sums that are complete.
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    if (node->is_tensor()) continue;
    node->bytes = node->direct_bytes;
    for (const std::uint32_t module : node->modules) node->bytes += nodes_[module].bytes;
  }
}

}  // namespace loadstone
