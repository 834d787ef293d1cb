// Reads a saved plan and opens its shards. Only this file of src/plan opens files.
#include <fmt/format.h>

#include <algorithm>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "catalog/config_claim.h"
#include "catalog/locate_remote.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "loadstone/storage.h"
#include "plan/plan_json.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

// Returns true if the path stays below the root. A saved plan is untrusted, so it must not refer to
// shards outside the root.
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

// Returns the folder of a root. The root may be a folder or the path of the only shard.
std::string folder_of(const std::string& root, Storage& storage) {
  if (is_remote(root)) return find_remote(storage, root).folder;
  return storage.kind(root) == EntryKind::file ? parent_path(root) : root;
}

// Finds the folder that contains a checkpoint's shards. Not thread-safe; used once.
class ShardFinder {
 public:
  // `root` is the path that the caller passed, and may be empty. `is_first` is false for an
  // adapter.
  ShardFinder(const SavedCheckpoint& saved, const OpenOptions& options, const std::string& root,
              const PlanPaths& paths, bool is_first)
      : saved_(saved),
        is_first_(is_first),
        root_(root),
        plan_folder_(paths.plan_folder),
        allow_remote_(paths.allow_remote),
        opener_{options.storage != nullptr ? *options.storage : local_storage(),
                options.allow_links} {}

  std::vector<std::string> find() {
    check_names();
    const std::string folder = find_folder();
    std::vector<std::string> shards;
    for (const SavedShard& shard : saved_.shards) {
      shards.push_back(join_path(folder, shard.path));
      // Throws if a link leads out of the checkpoint's folder and the caller does not allow that.
      // Other machines have no links, and a request for each shard takes time.
      if (!is_remote(folder)) static_cast<void>(opener_.open(shards.back(), folder));
    }
    if (!saved_.config_digest.empty()) require_claim(opener_, folder, saved_.config_digest);
    return shards;
  }

 private:
  void check_names() const {
    if (saved_.shards.empty()) {
      throw Error("plan.json", "the plan has no shards", {.field = "shards"});
    }
    for (std::size_t i = 0; i < saved_.shards.size(); ++i) {
      const std::string& path = saved_.shards[i].path;
      if (is_inside(path)) continue;
      throw Error("plan.json", "the plan has a shard that is not inside the checkpoint's folder",
                  {.field = fmt::format("shards[{}].path", i), .found = printable(path)});
    }
  }

  std::string find_folder() {
    if (!root_.empty()) return folder_of(root_, opener_.storage);
    if (is_remote(saved_.root)) return remote_folder();
    if (lies_in_plan_folder()) return folder_of(saved_.root, opener_.storage);
    // The original folder is tried first, because files of a different model in the plan's folder
    // may have the same names and sizes.
    try {
      return same_folder();
    } catch (const Error&) {
      if (plan_folder_holds_all()) return plan_folder_;
      throw;
    }
  }

  // Returns the folder that the plan specifies. Throws if its files are not those of the plan.
  std::string same_folder() const {
    std::string folder = folder_of(saved_.root, opener_.storage);
    for (const SavedShard& shard : saved_.shards) require_same_file(folder, shard);
    return folder;
  }

  // Prefers shards in the plan's folder, because they need no network access.
  std::string remote_folder() {
    if (plan_folder_holds_all()) return plan_folder_;
    if (!allow_remote_) {
      throw Error("plan.remote",
                  "the plan's checkpoint is on another machine, which loadstone does not contact "
                  "only because a file refers to it; allow it (--allow-remote, allow_remote=) or "
                  "pass the checkpoint (CHECKPOINT on the command line, root= in Python)",
                  {.path = saved_.root, .field = "root"});
    }
    return saved_.root;
  }

  [[nodiscard]] bool lies_in_plan_folder() const {
    if (plan_folder_.empty()) return false;
    try {
      return is_below(opener_.storage.resolve(saved_.root), opener_.storage.resolve(plan_folder_));
    } catch (const Error&) {
      return false;  // the root does not exist
    }
  }

  // Returns true if the plan and its checkpoint appear to have been moved together. Always false
  // for an adapter, whose own folder has files of the same names and sizes.
  [[nodiscard]] bool plan_folder_holds_all() const {
    if (plan_folder_.empty() || !is_first_) return false;
    return std::ranges::all_of(saved_.shards, [&](const SavedShard& shard) {
      try {
        const auto source = opener_.open(join_path(plan_folder_, shard.path), plan_folder_);
        return source->identity().bytes == shard.identity.bytes;
      } catch (const Error&) {
        return false;
      }
    });
  }

  // Compares inodes, because an attacker can name any file of this machine in a plan but does not
  // know the file's inode.
  void require_same_file(const std::string& folder, const SavedShard& shard) const {
    const auto source = opener_.open(join_path(folder, shard.path), folder);
    const FileIdentity now = source->identity();
    const bool same_bytes = now.bytes == shard.identity.bytes;
    if (same_bytes && now.inode == shard.identity.inode) return;
    const auto text = [&](const FileIdentity& identity) {
      return same_bytes ? fmt::format("inode {}", identity.inode) : counted(identity.bytes, "byte");
    };
    throw Error(
        "io.changed",
        "the plan refers to a file that differs from the one it was made for; if the checkpoint "
        "was moved or copied, pass its folder (CHECKPOINT on the command line, root= in Python)",
        {.path = source->path(),
         .field = same_bytes ? "inode" : "bytes",
         .found = text(now),
         .expected = text(shard.identity)});
  }

  const SavedCheckpoint& saved_;
  bool is_first_;
  const std::string& root_;
  const std::string& plan_folder_;
  bool allow_remote_;
  FileOpener opener_;
};

// Sets the caller's offload folder. The folder in the saved plan is used only in the error that is
// thrown if the caller passed none.
void take_offload_folder(Plan& plan, const std::string& folder) {
  require_local(folder);
  const bool needs_one = std::ranges::any_of(plan.targets, [&](const PlannedTarget& target) {
    return target.delivery == Delivery::disk_write ||
           (target.delivery == Delivery::disk_keep && !plan.offload_folder.empty());
  });
  if (needs_one && folder.empty() && plan.ok() && !plan.offload_folder.empty()) {
    throw Error("plan.offload_folder",
                "the plan writes tensors to a folder that its file specifies; to allow that, pass "
                "the folder again (--offload-folder, offload_folder=)",
                {.path = plan.offload_folder,
                 .field = "offload_folder",
                 .expected = "an offload folder, passed again"});
  }
  plan.offload_folder = folder;
}

std::shared_ptr<const Catalog> open_saved(const SavedPlan& saved, const OpenOptions& options,
                                          const PlanPaths& paths) {
  OpenOptions opening = options;
  // The plan may have been made with a higher GGUF rank limit, so the highest limit is accepted.
  opening.gguf_rank_max = std::max(opening.gguf_rank_max, defaults::gguf_rank_most);
  if (paths.other_roots.size() >= saved.checkpoints.size()) {
    refuse_option("root", "more checkpoints were passed than the plan has",
                  std::to_string(1 + paths.other_roots.size()),
                  fmt::format("at most {}", saved.checkpoints.size()));
  }
  std::vector<std::string> roots = {paths.root};
  roots.insert(roots.end(), paths.other_roots.begin(), paths.other_roots.end());
  roots.resize(saved.checkpoints.size());
  std::vector<std::shared_ptr<const Catalog>> opened;
  for (std::size_t c = 0; c < roots.size(); ++c) {
    const auto shards = ShardFinder(saved.checkpoints[c], options, roots[c], paths, c == 0).find();
    opened.push_back(shards.size() == 1 ? open_checkpoint(shards.front(), opening)
                                        : open_checkpoint(shards, opening));
  }
  if (opened.size() == 1) return opened.front();
  return std::make_shared<const Catalog>(std::move(opened));
}

}  // namespace

Plan plan_from_json(std::string_view text, const OpenOptions& options, const PlanPaths& paths) {
  return only_errors([&] {
    SavedPlan saved = read_plan(text);
    take_offload_folder(saved.plan, paths.offload_folder);
    auto catalog = open_saved(saved, options, paths);
    return bind_plan(std::move(saved), std::move(catalog));
  });
}

}  // namespace loadstone
