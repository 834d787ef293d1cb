// Finds the other files in the folder of a checkpoint.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/only_errors.h"
#include "catalog/assembled_file.h"
#include "catalog/config_file.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "convert/write/extras.h"
#include "convert/write/files.h"
#include "formats/sharded_index.h"
#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "loadstone/storage.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

constexpr std::string_view config_name = "config.json";

// Returns true if the file belongs to the checkpoint, or contains parts of its tensors. Returns
// false without a catalog.
bool is_own_file(const Catalog* catalog, std::string_view name) {
  if (catalog == nullptr) return false;
  const auto has_name = [&](const auto& file) { return file_name(file.path) == name; };
  for (std::uint32_t i = 0; i < catalog->shards().size(); ++i) {
    const Assembly* const assembly = catalog->assembly(i).get();
    if (has_name(catalog->shards()[i])) return true;
    if (assembly != nullptr && std::ranges::any_of(assembly->files, has_name)) return true;
  }
  return false;
}

// Returns true for an index, which opens the model of its folder.
bool opens_folder(std::string_view path) noexcept {
  return is_index_name(file_name(path)) || is_torch_index_name(file_name(path));
}

std::string folder_of(const std::string& path) {
  return opens_folder(path) ? parent_path(path) : path;
}

std::string path_in(const std::string& root, const std::string& name) {
  return root + (root.ends_with('/') ? "" : "/") + name;
}

// Returns the status of a path; nullopt if the system does not report it.
std::optional<FileStatus> status_of(Storage& storage, const std::string& path,
                                    bool follows_link = false) {
  FileStatus status;
  const bool is_known = storage.writable().try_status(path, follows_link, status) == 0;
  return is_known ? std::optional(status) : std::nullopt;
}

bool is_folder(Storage& storage, const std::string& path, bool follows_link) {
  const auto status = status_of(storage, path, follows_link);
  return status && status->kind == EntryKind::folder;
}

bool is_link(Storage& storage, const std::string& path) {
  const auto status = status_of(storage, path);
  return status && status->kind == EntryKind::link;
}

}  // namespace

// Opens a file of the folder. Follows the links that are allowed for shards: within the folder, or
// into the blobs of a Hugging Face cache. Returns null if the file is missing or not a regular
// file, or if a link leads elsewhere.
static std::shared_ptr<ByteSource> file_in(Storage& storage, const std::string& root,
                                           const std::string& name) {
  try {
    return FileOpener{storage}.open(path_in(root, name), root);
  } catch (const Error& error) {
    const std::string& code = error.code();
    if (code != "ix.path_escape" && code != "ix.not_regular" && code != "io.not_found") throw;
    return nullptr;
  }
}

// Returns the text of the folder's config of this name, or an empty text.
static std::string config_in(Storage& storage, const std::string& root, std::string_view name) {
  return find_config({storage}, root, name).value_or("");
}

// Adds one file of the local folder `root`.
static void add_file(Storage& storage, ModelFolder& folder, const std::string& root,
                     const std::string& name) {
  const std::string file = path_in(root, name);
  const auto status = status_of(storage, file);
  if (!status) return;
  if (status->kind == EntryKind::link) {
    auto source = file_in(storage, root, name);
    if (source == nullptr || source->identity().bytes > extra_bytes_max) {
      folder.links.push_back(name);
    } else {
      folder.files.push_back({.name = name, .copy_of = file, .source = std::move(source)});
    }
  } else if (status->kind != EntryKind::file) {
    return;
  } else if (status->identity.bytes <= extra_bytes_max) {
    folder.files.push_back({.name = name, .copy_of = file});
  } else if (name.find('/') != std::string::npos) {
    folder.left.push_back(name);
  }
}

// Returns true for files of a module's folder to copy. These include weights, because a library
// that opens the model reads them too.
static bool is_of_module(std::string_view name, bool with_code) {
  return !name.starts_with('.') && (with_code || file_role(name) != FileRole::code);
}

// Returns true if a component of the path is a link, because links may lead out of the folder.
static bool has_link(Storage& storage, const std::string& root, const std::string& path) {
  bool found = is_link(storage, path_in(root, path));
  for_each_folder(path, [&](const std::string& folder) {
    found = found || is_link(storage, path_in(root, folder));
  });
  return found;
}

static void add_module(Storage& storage, ModelFolder& folder, const std::string& root,
                       const std::string& path, bool with_code) {
  if (!is_path_below(path)) return folder.left.push_back(path);
  if (has_link(storage, root, path)) return folder.links.push_back(path);
  // The folder may be missing, because repositories store no folder for a module without files.
  for (const std::string& name : paths_below(storage.writable(), path_in(root, path))) {
    const std::string below = path + "/" + name;
    if (is_of_module(file_name(name), with_code)) {
      add_file(storage, folder, root, below);
    } else if (file_role(name) == FileRole::code) {
      folder.code.push_back(below);
    }
  }
}

// Records a pipeline's models, which are converted separately.
static void add_components(Storage& storage, ModelFolder& folder, const std::string& root) {
  for (std::string& name : component_folders(config_in(storage, root, pipeline_name))) {
    if (is_folder(storage, path_in(root, name), true)) folder.left.push_back(std::move(name));
  }
}

static void sort_names(ModelFolder& folder) {
  std::ranges::sort(folder.files, {}, &ExtraFile::name);
  std::ranges::sort(folder.links);
  std::ranges::sort(folder.denied);
  std::ranges::sort(folder.left);
  std::ranges::sort(folder.code);
  std::ranges::sort(folder.others);
}

// Classifies a file of the model's folder by its name. Returns true if the file is copied.
static bool takes(ModelFolder& folder, const Catalog* catalog, const std::string& name,
                  bool with_code) {
  const FileRole role = file_role(name);
  if (role == FileRole::code && !with_code) folder.code.push_back(name);
  if (role == FileRole::weights && !is_own_file(catalog, name)) folder.others.push_back(name);
  if (role == FileRole::code) return with_code;
  return role == FileRole::companion && name != config_name && name != pipeline_name &&
         !(name == adapter_config_name && catalog != nullptr && !is_adapter(*catalog));
}

// Records adapters, except checkpoints of a training run (checkpoint-500).
static void add_adapters(ModelFolder& folder, const std::string& name,
                         const std::vector<std::string>& files) {
  if (name.starts_with("checkpoint-")) return;
  for (const std::string& file : files) {
    if (file_role(file_name(file)) == FileRole::weights && is_adapter_file(file)) {
      folder.others.push_back(name + "/" + file);
    }
  }
}

// Adds the files of a folder of texts and images. Records only the name of other folders.
static void add_sub_folder(Storage& storage, ModelFolder& folder, const std::string& root,
                           const std::string& name) {
  const auto is_hidden = [](std::string_view path) {
    return path.starts_with('.') || path.find("/.") != std::string_view::npos ||
           file_role(path) == FileRole::skipped;
  };
  std::vector<std::string> files = paths_below(storage.writable(), path_in(root, name));
  std::erase_if(files, is_hidden);
  if (!std::ranges::all_of(files, is_text_or_image)) {
    folder.others.push_back(name + "/");
    return add_adapters(folder, name, files);
  }
  for (const std::string& file : files) add_file(storage, folder, root, name + "/" + file);
}

static ModelFolder model_folder_at(Storage& storage, const std::string& root, bool with_code,
                                   const Catalog* catalog = nullptr) {
  ModelFolder folder;
  if (!is_folder(storage, root, true)) return folder;
  std::vector<std::string> names;
  if (const int problem = storage.writable().try_list(root, names)) {
    throw Error("io.read", "the system cannot read the file",
                {.path = root, .system_error = problem});
  }
  const std::vector<std::string> modules = module_folders(config_in(storage, root, modules_name));
  add_components(storage, folder, root);
  const auto is_named = [&](const std::string& name) {
    return std::ranges::find(folder.left, name) != folder.left.end() ||
           std::ranges::any_of(modules, [&](const std::string& module) {
             return module == name || module.starts_with(name + "/");
           });
  };
  for (const std::string& name : names) {
    if (is_folder(storage, path_in(root, name), false)) {
      if (file_role(name) == FileRole::skipped || is_named(name)) continue;
      add_sub_folder(storage, folder, root, name);
    } else if (takes(folder, catalog, name, with_code)) {
      const bool is_receipt = is_receipt_file(storage.writable(), path_in(root, name));
      if (!is_receipt) add_file(storage, folder, root, name);
    }
    if (name != config_name) continue;
    folder.config = config_in(storage, root, config_name);
    if (folder.config.empty() && is_link(storage, path_in(root, name))) {
      folder.links.push_back(name);
    }
  }
  for (const std::string& module : modules) add_module(storage, folder, root, module, with_code);
  sort_names(folder);
  return folder;
}

// Returns the names to request from a host that cannot list a folder.
static std::vector<std::string> names_to_request() {
  std::vector<std::string> names = usual_companions();
  names.emplace_back(config_name);
  return names;
}

static std::vector<std::string> remote_names(Storage& storage, const std::string& folder,
                                             bool with_code) {
  if (!is_http(folder)) {
    try {
      return storage.list(folder);
    } catch (const Error& error) {
      const std::string& code = error.code();
      if (code != "io.denied" && code != "io.not_found" && code != "io.remote") throw;
    }
  }
  if (with_code) {
    throw Error("convert.extra",
                "the host does not list the folder, so loadstone cannot find its Python files",
                {.path = folder, .expected = "a conversion without --copy-code"});
  }
  return names_to_request();
}

static std::shared_ptr<ByteSource> remote_file(Storage& storage, const std::string& root,
                                               const std::string& name, ModelFolder& folder) {
  try {
    return storage.open_anew(join_path(root, name));
  } catch (const Error& error) {
    if (error.code() == "io.denied") folder.denied.push_back(name);
    if (error.code() != "io.not_found" && error.code() != "io.denied") throw;
    return nullptr;
  }
}

static void add_remote_module(Storage& storage, ModelFolder& folder, const std::string& root,
                              const std::string& path, bool with_code) {
  if (!is_path_below(path)) return folder.left.push_back(path);
  std::vector<std::string> names;
  try {
    names = is_http(root) ? names_to_request() : storage.list(join_path(root, path));
  } catch (const Error& error) {
    if (error.code() == "io.not_found") return;
    if (error.code() != "io.denied" && error.code() != "io.remote") throw;
    return folder.left.push_back(path);
  }
  if (is_http(root)) {
    for (const char* const weights : {"model.safetensors", "pytorch_model.bin"}) {
      names.emplace_back(weights);
    }
  }
  for (const std::string& name : names) {
    if (!is_of_module(name, with_code)) continue;
    const std::string below = path + "/" + name;
    const auto file = remote_file(storage, root, below, folder);
    if (file == nullptr) continue;
    if (file->identity().bytes > extra_bytes_max) {
      folder.left.push_back(below);
    } else {
      folder.files.push_back({.name = below, .copy_of = file->path(), .source = file});
    }
  }
}

static ModelFolder remote_folder_at(const Catalog& catalog, bool with_code) {
  Storage& storage = catalog.storage();
  const std::string& root = catalog.root();
  ModelFolder folder;
  std::string modules;
  for (const std::string& name : remote_names(storage, root, with_code)) {
    const bool is_config = name == config_name;
    const bool is_pipeline = name == pipeline_name;
    if (!is_config && !is_pipeline && !takes(folder, &catalog, name, with_code)) continue;
    const auto file = remote_file(storage, root, name, folder);
    if (file == nullptr) continue;
    if (name == modules_name) modules = read_config(*file);
    if (is_config) {
      folder.config = read_config(*file);
    } else if (is_pipeline) {
      folder.left = component_folders(read_config(*file));
    } else if (file->identity().bytes <= extra_bytes_max) {
      folder.files.push_back({.name = name, .copy_of = file->path(), .source = file});
    }
  }
  for (const std::string& module : module_folders(modules)) {
    add_remote_module(storage, folder, root, module, with_code);
  }
  sort_names(folder);
  return folder;
}

ModelFolder read_model_folder(const Catalog& catalog, const std::string& path, bool with_code) {
  return only_errors([&] {
    if (!is_remote(path)) {
      return model_folder_at(catalog.storage(), folder_of(path), with_code, &catalog);
    }
    const bool is_folder = opens_folder(path) || path == catalog.root() ||
                           catalog.storage().kind(path) == EntryKind::folder;
    if (!is_folder) return ModelFolder();
    return remote_folder_at(catalog, with_code);
  });
}

ModelFolder read_model_folder(const std::string& path, bool with_code) {
  return only_errors([&] { return model_folder_at(local_storage(), path, with_code); });
}

ModelFolder folders_left_out(const std::string& source) {
  return only_errors([&] {
    ModelFolder folder;
    if (is_remote(source)) return folder;
    const std::string path = folder_of(source);
    Storage& storage = local_storage();
    for (std::string& name : module_folders(config_in(storage, path, modules_name))) {
      const bool is_empty =
          !is_path_below(name) || paths_below(storage.writable(), path_in(path, name)).empty();
      if (!is_empty) folder.left.push_back(std::move(name));
    }
    add_components(storage, folder, path);
    folder.others = model_folder_at(storage, path, false).others;
    std::erase_if(folder.others, [](const auto& name) { return !is_adapter_file(name); });
    sort_names(folder);
    return folder;
  });
}

}  // namespace loadstone
