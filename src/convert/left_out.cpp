#include "convert/left_out.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "base/text.h"
#include "base/words.h"
#include "catalog/config_claim.h"
#include "catalog/config_file.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "convert/extras.h"
#include "convert/files.h"
#include "convert/json_text.h"
#include "convert/plain_codes.h"
#include "convert/sub_folders.h"
#include "loadstone/error.h"

namespace loadstone {

bool is_adapter(const Catalog& catalog) {
  const auto& models = catalog.checkpoints();
  const Catalog& first = models.empty() ? catalog : *models.front();
  return std::ranges::any_of(first.shards(), is_adapter_file, &Shard::path);
}

bool is_adapter_file(std::string_view path) { return file_name(path).starts_with(adapter_stem); }

bool is_claim(std::string_view name) {
  return name == claim_name || std::ranges::count(own_configs, name, &OwnConfig::name) > 0;
}

ModelFolder claims_beside(const Catalog& catalog) {
  ModelFolder folder;
  const auto is_gguf = [](const Shard& shard) { return shard.format == FileFormat::gguf; };
  if (std::ranges::any_of(catalog.shards(), is_gguf)) return folder;
  const FileOpener opener{catalog.storage(), true};
  const bool must_read = may_hold_codes(catalog);  // else the file may be another program's
  const auto text = [&](std::string_view name) -> std::optional<std::string> {
    try {
      return find_config(opener, catalog.root(), name);
    } catch (const Error& error) {
      if (must_read || !is_word(error.code(), "format.config q.config ix.not_regular")) throw;
      return std::nullopt;
    }
  };
  const auto config = text("config.json");
  folder.config = config.value_or("");
  if (config && config->empty()) folder.denied.emplace_back("config.json");
  std::vector<std::string_view> names = {claim_name};
  std::ranges::transform(own_configs, std::back_inserter(names), &OwnConfig::name);
  for (const std::string_view name : names) {
    auto found = text(name);
    if (!found) continue;
    if (found->empty()) {
      folder.denied.emplace_back(name);
    } else {
      folder.files.push_back({.name = std::string(name), .text = *std::move(found)});
    }
  }
  return folder;
}

std::string_view claiming_file(const ModelFolder& folder) {
  const std::string& config = folder.config;
  if (is_json_object(config) && quantization_claim(config).is_made) return "config.json";
  const auto file =
      std::ranges::find_if(folder.files, [](const ExtraFile& each) { return is_claim(each.name); });
  return file == folder.files.end() ? std::string_view() : std::string_view(file->name);
}

Finding unread_claim(std::string_view file, std::string_view root) {
  const std::string path = root.empty() ? std::string(file) : fmt::format("{}/{}", root, file);
  const std::string_view what = file == "config.json" ? "the section from it" : "the file";
  return {.severity = Severity::error,
          .code = "plan.config_mismatch",
          .message = fmt::format("{} says that the checkpoint is quantized, and none of its "
                                 "tensors is in a layout that this version knows",
                                 printable(path)),
          .suggestion = fmt::format("remove {}, if all tensors are plain numbers", what)};
}

// Takes the adapters out of the weights that are left; of an adapter itself other formats stay.
static std::vector<std::string> take_adapters(std::vector<std::string>& others,
                                              const Catalog& catalog) {
  const auto& inputs = catalog.checkpoints();
  const std::string& root = inputs.empty() ? catalog.root() : inputs.front()->root();
  const auto is_input = [&](const std::string& name) {
    const std::string path = join_path(root, name);
    const auto is_shard = [&](const Shard& shard) {
      return shard.path == path || same_file(local_storage().writable(), shard.path, path);
    };
    return std::ranges::any_of(catalog.shards(), is_shard) ||
           std::ranges::any_of(inputs, [&](const auto& input) {
             return std::ranges::any_of(input->shards(), is_shard);
           });
  };
  std::erase_if(others, [&](const auto& name) { return is_adapter_file(name) && is_input(name); });
  const bool is_of_adapter = is_adapter(catalog);
  const auto found = std::ranges::stable_partition(others, [&](const std::string& name) {
    return !is_adapter_file(name) || (is_of_adapter && name.find('/') == std::string::npos);
  });
  std::vector<std::string> adapters(found.begin(), found.end());
  others.erase(found.begin(), found.end());
  return adapters;
}

// Returns true for "auto_map", and for classes of sentence-transformers that the folder defines.
static bool names_code(const ModelFolder& folder) {
  if (folder.config.find("\"auto_map\"") != std::string::npos) return true;
  const auto modules = std::ranges::find(folder.files, modules_name, &ExtraFile::name);
  if (modules == folder.files.end()) return false;
  const std::string text = text_of(*modules);
  return std::ranges::any_of(folder.code, [&](std::string_view file) {
    const std::string module(file.substr(0, file.rfind('.')));
    return text.find(fmt::format("\"{}.", module)) != std::string::npos;
  });
}

void tell_left(const ModelFolder& folder, const std::vector<std::string>& denied,
               const Catalog& catalog, std::vector<Finding>& findings) {
  const auto add = [&](const std::vector<std::string>& names, std::string message,
                       const char* suggestion, Severity severity = Severity::warning) {
    if (names.empty()) return;
    findings.push_back({.severity = severity,
                        .code = "convert.not_copied",
                        .sources = names,
                        .message = std::move(message) + ": " + name_list(names),
                        .suggestion = suggestion});
  };
  add(folder.links, "links are not copied; the folder has " + counted(folder.links.size(), "link"),
      "name the folder that holds the files themselves");
  add(denied,
      "the host denies access to, or lacks, " + counted(denied.size(), "file") +
          " next to the model",
      "copy them by hand where the model needs them");
  add(folder.left, "modules.json or model_index.json names what this conversion leaves out",
      "convert or copy it into the output if the model needs it");
  const bool needs_code = names_code(folder);
  add(folder.code,
      needs_code ? "the model's configs name Python code, and Python files are not copied"
                 : "Python files are not copied",
      "--copy-code (copy_code=True) copies them; a loader may run them",
      needs_code ? Severity::warning : Severity::info);
  std::vector<std::string> others = folder.others;
  add(take_adapters(others, catalog), "adapters in the model's folder are not copied",
      "merge them (--lora, lora=), or copy their folders if they fit the output");
  add(others, "weights that this conversion does not read are not copied",
      "convert or copy them into the output if the model needs them", Severity::info);
}

void drop_claims(std::vector<ExtraFile>& files, std::vector<Finding>& findings) {
  std::vector<std::string> names;
  std::erase_if(files, [&](const ExtraFile& file) {
    if (!is_claim(file.name)) return false;
    if (file.name != claim_name) names.push_back(file.name);
    return true;
  });
  if (names.empty()) return;
  findings.push_back({.severity = Severity::info,
                      .code = "convert.not_copied",
                      .sources = names,
                      .message = "declares the source's encoding, and the output has a different "
                                 "one: " +
                                 name_list(names)});
}

}  // namespace loadstone
