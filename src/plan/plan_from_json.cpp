// The one place of this room that opens files: a saved plan's shards.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "loadstone/error.h"
#include "loadstone/storage.h"
#include "plan/plan_json.h"

namespace loadstone {

namespace {

// What a caller may have allowed when the plan was made.
constexpr std::uint32_t saved_rank_max = 8;

// Shards stand in the root or below it; the plan's word for where is not trusted.
bool is_inside(std::string_view path) {
  if (path.empty() || path.front() == '/') return false;
  while (!path.empty()) {
    const auto slash = path.find('/');
    const std::string_view part = path.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (part.find('\0') != std::string_view::npos) return false;
    path.remove_prefix(slash == std::string_view::npos ? path.size() : slash + 1);
    if (slash != std::string_view::npos && path.empty()) return false;
  }
  return true;
}

// A root may be given as the one shard's own path too.
std::string folder_of(const std::string& root, Storage& storage) {
  if (storage.kind(root) != EntryKind::file) return root;
  const auto slash = root.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : root.substr(0, slash);
}

}  // namespace

Plan plan_from_json(std::string_view text, const OpenOptions& options, const std::string& root) {
  SavedPlan saved = read_plan(text);
  if (saved.shards.empty()) {
    throw Error("plan.json", "a plan without a shard", {.field = "shards"});
  }
  Storage& storage = options.storage != nullptr ? *options.storage : local_storage();
  const std::string folder = folder_of(root.empty() ? saved.root : root, storage);
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < saved.shards.size(); ++i) {
    const std::string& path = saved.shards[i].path;
    if (!is_inside(path)) {
      throw Error("plan.json", "a shard that is not below the root",
                  {.field = fmt::format("shards[{}].path", i), .found = printable(path)});
    }
    paths.push_back(folder.ends_with('/') ? folder + path : folder + '/' + path);
  }
  OpenOptions opening = options;
  opening.gguf_rank_max = std::max(opening.gguf_rank_max, saved_rank_max);  // as it was planned
  auto catalog =
      paths.size() == 1 ? open_checkpoint(paths.front(), opening) : open_checkpoint(paths, opening);
  return bind_plan(std::move(saved), std::move(catalog));
}

}  // namespace loadstone
