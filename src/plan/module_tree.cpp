#include "plan/module_tree.h"

#include "loadstone/name_hash.h"

namespace loadstone {

std::size_t parent_end(std::string_view name) noexcept {
  // "rope.freqs[0]" and "cache['a.b']": what stands in brackets is no module.
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
    // The modules around it, innermost first, up to one that is known.
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
  // Children come after their parents, so backwards every sum is complete when it is used.
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    if (node->is_tensor()) continue;
    node->bytes = node->direct_bytes;
    for (const std::uint32_t module : node->modules) node->bytes += nodes_[module].bytes;
  }
}

}  // namespace loadstone
