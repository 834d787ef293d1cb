#include "convert/sub_folders.h"

#include <algorithm>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "convert/files.h"

namespace loadstone {

namespace {

constexpr unsigned levels_max = 8;

void add_below(WritableStorage& storage, const std::string& folder, const std::string& prefix,
               unsigned levels, std::vector<std::string>& paths) {
  for (const std::string& name : storage.list(folder)) {
    const std::string path = folder + "/" + name;
    if (levels > 0 && is_plain_folder(storage, path)) {
      add_below(storage, path, prefix + name + "/", levels - 1, paths);
    } else {
      paths.push_back(prefix + name);
    }
  }
}

void sort_once(std::vector<std::string>& names) {
  std::ranges::sort(names);
  names.erase(std::ranges::unique(names).begin(), names.end());
}

}  // namespace

bool is_path_below(std::string_view path) {
  constexpr std::size_t name_bytes_max = 255;
  while (true) {
    const std::size_t slash = std::min(path.find('/'), path.size());
    const std::string_view name = path.substr(0, slash);
    if (name.empty() || name == "." || name == ".." || name.size() > name_bytes_max ||
        name.find('\0') != std::string_view::npos || name.starts_with(".loadstone-")) {
      return false;
    }
    if (slash == path.size()) return true;
    path.remove_prefix(slash + 1);
  }
}

std::vector<std::string> module_folders(std::string_view modules) {
  dom::parser parser;
  dom::array items;
  std::vector<std::string> folders;
  if (parsed_json(parser, python_json(modules).text).get(items) != simdjson::SUCCESS)
    return folders;
  for (const auto item : items) {
    std::string_view path;
    if (item["path"].get(path) != simdjson::SUCCESS) continue;
    while (path.ends_with('/')) path.remove_suffix(1);
    if (!path.empty() && path != ".") folders.emplace_back(path);
  }
  sort_once(folders);
  return folders;
}

std::vector<std::string> component_folders(std::string_view pipeline) {
  dom::parser parser;
  dom::object fields;
  std::vector<std::string> folders;
  if (parsed_json(parser, python_json(pipeline).text).get(fields) != simdjson::SUCCESS)
    return folders;
  for (const auto field : fields) {
    dom::array classes;
    if (field.key.starts_with("_") || field.value.get(classes) != simdjson::SUCCESS) continue;
    if (classes.size() == 2 && !classes.at(0).is_null()) folders.emplace_back(field.key);
  }
  sort_once(folders);
  return folders;
}

std::vector<std::string> paths_below(WritableStorage& storage, const std::string& folder) {
  std::vector<std::string> paths;
  add_below(storage, folder, {}, levels_max, paths);
  std::ranges::sort(paths);
  return paths;
}

bool remove_empty_folders(WritableStorage& storage, const std::string& folder) {
  for (const std::string& name : storage.list(folder)) {
    const std::string path = folder + "/" + name;
    if (is_plain_folder(storage, path)) static_cast<void>(remove_empty_folders(storage, path));
  }
  return storage.remove_folder(folder);
}

}  // namespace loadstone
