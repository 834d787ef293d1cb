#include "catalog/locate.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "base/natural_order.h"
#include "base/text.h"
#include "catalog/dcp_parts.h"
#include "catalog/deepspeed.h"
#include "catalog/locate_remote.h"
#include "catalog/paths.h"
#include "formats/dcp_metadata.h"
#include "formats/sharded_index.h"
#include "formats/torch.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

constexpr std::string_view safetensors_suffix = ".safetensors";
constexpr std::string_view gguf_suffix = ".gguf";
// Prefixes of other torch files that training programs write into the folder.
constexpr std::array<std::string_view, 5> torch_others = {"training_args.", "optimizer.",
                                                          "scheduler.", "scaler.", "rng_state"};
// Names that transformers and diffusers use for torch files, with and without an index.
constexpr std::array<std::string_view, 2> usual_torch_indexes = {
    "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin.index.json"};
constexpr std::array<std::string_view, 2> usual_torch_files = {"pytorch_model.bin",
                                                               "diffusion_pytorch_model.bin"};

void refuse_share_of_zero(const std::string& path) {
  if (!is_share_of_zero(file_name(path))) return;
  throw Error("format.no_checkpoint", zero_message,
              {.path = path, .field = "file", .expected = "a file of whole tensors"});
}

// Files whose names differ only in their part number.
struct PartSet {
  std::string stem;
  std::vector<std::string> names;
};

std::vector<PartSet> part_sets(const std::vector<std::string>& names, std::string_view suffix) {
  std::map<std::string, std::vector<std::string>> sets;
  for (const std::string& name : names) {
    const std::string stem = name.substr(0, name.size() - suffix.size());
    const auto part = parse_part_name(stem);
    sets[part ? part->stem : stem].push_back(name);
  }
  std::vector<PartSet> all;
  for (auto& [stem, members] : sets) {
    std::ranges::sort(members, natural_less);
    all.push_back({stem, std::move(members)});
  }
  std::ranges::sort(all, natural_less, &PartSet::stem);
  return all;
}

// Returns true for a set such as "model.fp16" next to "model", which contains the same weights in a
// different precision.
bool is_variant(const PartSet& set, const std::vector<PartSet>& all) {
  const std::size_t dot = set.stem.rfind('.');
  if (dot == std::string::npos || dot + 1 == set.stem.size()) return false;
  const bool only_digits = is_digits(std::string_view(set.stem).substr(dot + 1));
  return !only_digits && std::ranges::any_of(all, [&](const PartSet& other) {
    return other.stem == set.stem.substr(0, dot);
  });
}

// Returns false if the host denies access, because hosts without listings may deny access to
// missing files.
bool has_beside_index(Storage& storage, const std::string& path) {
  try {
    return has_remote(storage, path);
  } catch (const Error& error) {
    if (error.code() != "io.denied") throw;
    return false;
  }
}

// Returns the names in a folder. If a remote host does not list the folder, returns the first usual
// name that exists. If that name is an index, also returns the single file that transformers would
// read.
std::vector<std::string> names_in(Storage& storage, const std::string& folder) {
  if (!is_remote(folder)) return storage.list(folder);
  if (auto listed = list_remote(storage, folder)) return std::move(*listed);
  for (const auto& names : {usual_indexes, usual_files, usual_torch_indexes, usual_torch_files}) {
    for (const std::string_view name : names) {
      if (!has_remote(storage, join_path(folder, name))) continue;
      std::vector<std::string> found = {std::string(name)};
      const bool is_index = is_index_name(name);
      const std::string_view other =
          is_index ? usual_files.front() : std::string_view(usual_torch_files.front());
      if ((is_index || is_torch_index_name(name)) &&
          has_beside_index(storage, join_path(folder, other))) {
        found.emplace_back(other);
      }
      return found;
    }
  }
  if (has_remote(storage, join_path(folder, dcp_metadata_name))) {
    return {std::string(dcp_metadata_name)};
  }
  return {};
}

// Files that transformers and diffusers look for in a folder; each reads the first that exists.
constexpr std::array<std::string_view, 4> model_order = {
    usual_files[0], usual_indexes[0], usual_torch_files[0], usual_torch_indexes[0]};
constexpr std::array<std::string_view, 4> diffusion_order = {
    usual_indexes[1], usual_files[1], usual_torch_files[1], usual_torch_indexes[1]};

bool is_torch_model(std::string_view name) {
  return std::ranges::none_of(torch_others,
                              [&](std::string_view each) { return name.starts_with(each); });
}

// Returns the names that are in the list.
std::vector<std::string> among(std::vector<std::string> names,
                               std::span<const std::string_view> list) {
  std::erase_if(names, [&](const auto& name) { return std::ranges::count(list, name) == 0; });
  return names;
}

std::vector<std::string> others_than(std::string_view name, std::vector<std::string> names) {
  std::erase(names, name);
  return names;
}

// Not thread-safe.
class FolderSearch {
 public:
  FolderSearch(Storage& storage, const std::string& folder) : folder_(folder) {
    files_.root = folder;
    names_ = names_in(storage, folder);
    for (const std::string& name : names_) {
      if (name == dcp_metadata_name) has_dcp_ = true;
      if (name.starts_with('.'))
        continue;  // macOS writes "._model.safetensors" next to the real file
      if (is_index_name(name)) indexes_.push_back(name);
      if (name.ends_with(safetensors_suffix)) safetensors_.push_back(name);
      if (name.ends_with(gguf_suffix)) ggufs_.push_back(name);
      if (name == "model_index.json") pipeline_ = true;
      if (is_torch_index_name(name)) torch_indexes_.push_back(name);
      if (is_torch_name(name)) torch_.push_back(name);
      if (is_share_of_zero(name) || name == "zero_to_fp32.py") has_zero_ = true;
    }
  }

  [[nodiscard]] bool is_empty() const noexcept { return names_.empty(); }

  CheckpointFiles find() {
    take();
    note_preferred(diffusion_order);
    // Next to an adapter, transformers reads the model that the adapter's config names.
    if (!has("adapter_config.json")) note_preferred(model_order);
    return std::move(files_);
  }

 private:
  [[noreturn]] void refuse(std::string message, const std::vector<std::string>& found) const {
    throw Error("format.no_checkpoint", std::move(message),
                {.path = folder_,
                 .field = "folder",
                 .found = name_list(found),
                 .expected = "one checkpoint in safetensors, GGUF or torch's format"});
  }

  void take() {
    if (take_dcp() || take_index() || take_usual_file()) return;
    if (!safetensors_.empty() && !ggufs_.empty()) {
      std::vector<std::string> both = safetensors_;
      both.insert(both.end(), ggufs_.begin(), ggufs_.end());
      refuse("the folder contains safetensors and GGUF files; pass the file that you want", both);
    }
    if (!safetensors_.empty()) {
      take_safetensors();
    } else if (!ggufs_.empty()) {
      take_gguf();
    } else if (!torch_.empty() || !torch_indexes_.empty()) {
      take_torch();
    } else {
      refuse_empty();
    }
  }

  // Takes a folder of torch.distributed.checkpoint. Other torch files in it belong to a trainer.
  bool take_dcp() {
    if (!has_dcp_) return false;
    std::vector<std::string> others = safetensors_;
    others.insert(others.end(), ggufs_.begin(), ggufs_.end());
    if (!others.empty()) {
      others.insert(others.begin(), std::string(dcp_metadata_name));
      refuse(
          "the folder contains a checkpoint of torch.distributed.checkpoint and others; pass the "
          "file that you want",
          others);
    }
    files_.files = {std::string(dcp_metadata_name)};
    files_.ignored = torch_;
    return true;
  }

  bool take_index() {
    const std::vector<std::string> usual = among(indexes_, usual_indexes);
    const std::vector<std::string>& candidates = usual.empty() ? indexes_ : usual;
    if (candidates.empty()) return false;
    // An index with an unusual name next to a plain model.safetensors belongs to a variant.
    if (usual.empty() && !among(safetensors_, usual_files).empty()) return false;
    if (candidates.size() > 1) {
      refuse("the folder contains several indexes; pass the index that you want", candidates);
    }
    files_.index = candidates.front();
    ignore_others(safetensors_);
    return true;
  }

  bool take_usual_file() {
    const std::vector<std::string> present = among(safetensors_, usual_files);
    if (present.empty()) return false;
    if (present.size() > 1) {
      refuse("the folder contains two models; pass the file that you want", present);
    }
    files_.files = present;
    ignore_others(others_than(present.front(), safetensors_));
    return true;
  }

  void take_safetensors() {
    const std::vector<PartSet> sets = part_sets(safetensors_, safetensors_suffix);
    std::vector<std::string> ignored;
    std::size_t taken = 0;
    for (const PartSet& set : sets) {
      const bool variant = is_variant(set, sets);
      auto& names = variant ? ignored : files_.files;
      names.insert(names.end(), set.names.begin(), set.names.end());
      taken += variant ? 0 : 1;
    }
    files_.numbered_set = taken == 1;
    std::ranges::sort(files_.files, natural_less);
    ignore_others(std::move(ignored));
  }

  void take_gguf() {
    const std::vector<PartSet> sets = part_sets(ggufs_, gguf_suffix);
    if (sets.size() > 1) {
      refuse("the folder contains several GGUF files; pass the file that you want", ggufs_);
    }
    files_.files = {sets.front().names.front()};  // its split metadata identify the other parts
    ignore_others({});
  }

  // Takes the index, else a file with a usual name, else the only file that is a torch model.
  void take_torch() {
    if (torch_indexes_.size() == 1) {
      files_.index = torch_indexes_.front();
      std::ranges::copy_if(torch_, std::back_inserter(files_.ignored), is_torch_model);
      return;
    }
    const std::vector<std::string> usual = among(torch_, usual_torch_files);
    std::vector<std::string> others;
    std::ranges::copy_if(torch_, std::back_inserter(others), is_torch_model);
    const std::vector<std::string>& candidates = usual.empty() ? others : usual;
    if (!torch_indexes_.empty() || candidates.size() != 1) {
      refuse(has_zero_ ? zero_message
                       : "the folder contains several torch files, or only files of a training "
                         "run; pass the file that you want",
             torch_indexes_.empty() ? torch_ : torch_indexes_);
    }
    files_.files = candidates;
    files_.numbered_set = true;
    files_.ignored = others_than(candidates.front(), torch_);
  }

  [[noreturn]] void refuse_empty() const {
    require_common_dcp_metadata(folder_, names_);
    const char* const message =
        pipeline_ ? "this is a diffusers pipeline, whose checkpoints are in its subfolders, such "
                    "as unet or transformer; pass one of these folders"
                  : "the folder contains no checkpoint";
    refuse(has_zero_ ? zero_message : message, {});
  }

  // Also lists weights in formats other than the one that is taken.
  void ignore_others(std::vector<std::string> ignored) {
    const bool is_gguf = safetensors_.empty() && !files_.index;
    if (!is_gguf) ignored.insert(ignored.end(), ggufs_.begin(), ggufs_.end());
    std::ranges::copy_if(torch_, std::back_inserter(ignored), is_torch_model);
    files_.ignored = std::move(ignored);
  }

  [[nodiscard]] bool has(std::string_view name) const {
    return std::ranges::find(names_, name) != names_.end();
  }

  void note_preferred(std::span<const std::string_view> order) {
    const auto first = std::ranges::find_if(order, [&](auto name) { return has(name); });
    if (first == order.end() || files_.index == *first) return;
    if (std::ranges::find(files_.files, *first) == files_.files.end()) {
      files_.preferred.emplace_back(*first);
    }
  }

  const std::string& folder_;
  CheckpointFiles files_;
  std::vector<std::string> names_;  // all files
  std::vector<std::string> indexes_;
  std::vector<std::string> safetensors_;
  std::vector<std::string> ggufs_;
  std::vector<std::string> torch_;
  std::vector<std::string> torch_indexes_;
  bool pipeline_ = false;
  bool has_dcp_ = false;
  bool has_zero_ = false;
};

bool has_wildcard(std::string_view path) noexcept {
  return path.find_first_of("*?[") != std::string_view::npos;
}

// Returns all paths that match. Matches each part of the pattern with the names in one folder.
std::vector<std::string> expand_pattern(Storage& storage, const std::string& pattern) {
  std::vector<std::string> found = {pattern.starts_with('/') ? "/" : "."};
  std::string_view rest = pattern;
  while (!rest.empty()) {
    const std::size_t slash = std::min(rest.find('/'), rest.size());
    const std::string part(rest.substr(0, slash));
    rest.remove_prefix(std::min(slash + 1, rest.size()));
    if (part.empty()) continue;
    std::vector<std::string> next;
    for (const std::string& folder : found) {
      if (!has_wildcard(part)) {
        next.push_back(join_path(folder, part));
        continue;
      }
      try {
        for (const std::string& name : storage.list(folder)) {
          if (::fnmatch(part.c_str(), name.c_str(), FNM_PERIOD) == 0) {
            next.push_back(join_path(folder, name));
          }
        }
      } catch (const Error&) {
        continue;  // not a readable folder: nothing matches below it
      }
    }
    found = std::move(next);
  }
  return found;
}

bool exists(Storage& storage, const std::string& path) {
  try {
    return storage.kind(path) != EntryKind::other;
  } catch (const Error&) {
    return false;
  }
}

CheckpointFiles locate_pattern(Storage& storage, const std::string& pattern) {
  std::vector<std::string> all = expand_pattern(storage, pattern);
  std::erase_if(all, [&](const std::string& path) { return !exists(storage, path); });
  std::vector<std::string> paths;
  for (const std::string& path : all) {
    if (path.ends_with(safetensors_suffix) || path.ends_with(gguf_suffix)) paths.push_back(path);
  }
  if (paths.empty()) paths = std::move(all);
  if (paths.empty()) {
    throw Error("io.not_found", "no file name matches this pattern", {.path = pattern});
  }
  if (paths.size() == 1) return locate_checkpoint(storage, paths.front());
  std::ranges::sort(paths, natural_less);
  return as_checkpoint_files(storage, std::move(paths));
}

CheckpointFiles locate_file(std::string folder, const std::string& name) {
  CheckpointFiles files;
  files.root = std::move(folder);
  if (is_index_name(name) || is_torch_index_name(name)) {
    files.index = name;
    return files;
  }
  files.files = {name};
  return files;
}

bool is_checkpoint_name(std::string_view name) {
  return name.ends_with(safetensors_suffix) || name.ends_with(gguf_suffix) || is_torch_name(name) ||
         is_index_name(name) || is_torch_index_name(name);
}

// Finds the checkpoint of a remote file or folder. If a web server has no file of this name, but
// has a checkpoint below it, the path is that of a folder.
CheckpointFiles locate_remote(Storage& storage, const std::string& path) {
  try {
    const RemotePlace place = find_remote(storage, path);
    if (place.file.empty()) return FolderSearch(storage, place.folder).find();
    return locate_file(place.folder, place.file);
  } catch (const Error& error) {
    const bool may_be_folder = error.code() == "io.not_found" && is_http(path) &&
                               path.find_first_of("?#") == std::string::npos &&
                               !path.ends_with('/') && !is_checkpoint_name(path);
    if (!may_be_folder) throw;
    FolderSearch search(storage, path);
    if (search.is_empty()) throw;
    return search.find();
  }
}

}  // namespace

void report_ignored(CheckpointFiles files, const std::vector<std::string>& shards,
                    std::vector<Finding>& findings) {
  const auto is_shard = [&](const std::string& name) {
    return std::ranges::find(shards, name) != shards.end();
  };
  std::erase_if(files.ignored, is_shard);
  std::erase_if(files.preferred, is_shard);
  if (files.ignored.empty() && files.preferred.empty()) return;
  std::string message = printable(files.root, 400) + ": ";
  for (const std::string& name : files.preferred) {
    const bool is_diffusion = std::ranges::find(diffusion_order, name) != diffusion_order.end();
    message += fmt::format("{} reads '{}', ", is_diffusion ? "diffusers" : "transformers", name);
  }
  const std::vector<std::string> read = files.index ? std::vector{*files.index} : files.files;
  message += files.preferred.empty()
                 ? "loadstone does not read these files next to the checkpoint: " +
                       name_list(files.ignored)
                 : "but loadstone reads " + name_list(read);
  findings.push_back(
      {.severity = files.preferred.empty() ? Severity::info : Severity::warning,
       .code = "format.ignored",
       .sources = std::move(files.ignored),
       .message = std::move(message),
       .suggestion = "To read other files, pass a file, an index, a pattern or a list."});
}

CheckpointFiles locate_checkpoint(Storage& storage, const std::string& path) {
  if (is_remote(path)) return locate_remote(storage, path);
  EntryKind kind = EntryKind::other;
  try {
    kind = storage.kind(path);
  } catch (const Error& error) {
    if (error.code() == "io.not_found" && has_wildcard(path)) return locate_pattern(storage, path);
    throw;
  }
  if (kind == EntryKind::folder) return FolderSearch(storage, path).find();
  refuse_share_of_zero(path);
  if (kind == EntryKind::file) return locate_file(parent_path(path), std::string(file_name(path)));
  throw Error("ix.not_regular", "the path is not a regular file",
              {.path = path,
               .field = "file",
               .found = "a named pipe, socket or device",
               .expected = "a file or a folder"});
}

CheckpointFiles as_checkpoint_files(Storage& storage, std::vector<std::string> paths) {
  for (std::string& path : paths) {
    if (is_remote(path)) path = storage.resolve(path);
    refuse_share_of_zero(path);
  }
  CheckpointFiles files;
  files.root = parent_path(paths.front());
  for (const std::string& path : paths) {
    while (files.root != "." && files.root != "/" && !is_below(path, files.root)) {
      files.root = parent_path(files.root);
    }
    // A bare name and an absolute path have no common folder that can be named.
    if (files.root == "/" && !path.starts_with('/')) files.root = ".";
    if (is_remote(path) && !is_remote(files.root)) files.root = ".";
  }
  for (const std::string& path : paths) {
    const bool below = files.root != "." && is_below(path, files.root);
    const std::size_t length = files.root.size() + (files.root.ends_with('/') ? 0 : 1);
    files.files.push_back(below ? name_below(files.root, path.substr(length)) : path);
  }
  return files;
}

}  // namespace loadstone
