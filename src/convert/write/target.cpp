#include "convert/write/target.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "base/words.h"
#include "catalog/assembled_file.h"
#include "catalog/config_claim.h"
#include "catalog/locate.h"
#include "catalog/paths.h"
#include "convert/json_text.h"
#include "convert/tied_head.h"
#include "convert/write/container.h"
#include "convert/write/extras.h"
#include "convert/write/files.h"
#include "convert/write/finished.h"
#include "convert/write/work_folder.h"
#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "plan/catalog_of.h"
#include "storage/disk_space.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_target(const std::string& path, std::string message,
                                std::string found = {}) {
  throw Error("convert.target", std::move(message), {.path = path, .found = std::move(found)});
}

bool is_inside(const fs::path& path, const fs::path& folder) {
  const fs::path relative = path.lexically_relative(folder);
  return !relative.empty() && *relative.begin() != ".." && relative != ".";
}

// Rejects a file to replace that is a file of the source.
void require_another(WritableStorage& storage, const Catalog& catalog, const std::string& path) {
  const auto status = storage.status(path, true);
  const auto check = [&](const std::string& source_path, const std::string& name) {
    const auto source = storage.status(source_path, true);
    if (status && source && same_file(*status, *source)) {
      refuse_target(path, "the target is a file of the source", printable(name));
    }
  };
  for (std::uint32_t i = 0; i < catalog.shards().size(); ++i) {
    check(catalog.shards()[i].path, catalog.shards()[i].relative_path);
    if (const auto& assembly = catalog.assembly(i)) {
      for (const Assembly::File& file : assembly->files) check(file.path, file.path);
    }
  }
}

// Rejects a target that is a source, and a target whose change would change a source.
void check_not_source(WritableStorage& storage, const Catalog& catalog, const TargetPlace& place) {
  require_another(storage, catalog, place.path);
  const fs::path target = storage.real_path(place.path);
  bool in_source_folder = false;
  for (const Shard& shard : catalog.shards()) {
    const fs::path folder = fs::path(storage.real_path(shard.path)).parent_path();
    if (target == folder) refuse_target(place.path, "the target is the folder of the source");
    in_source_folder = in_source_folder || is_inside(target, folder);
  }
  // A model with several shards is found by listing its folder, so no other files may be written
  // there.
  if (catalog.shards().size() > 1 && in_source_folder) {
    refuse_target(place.path, "the target is in the folder of the source");
  }
}

template <typename Check>
void for_each_source(const Conversion& conversion, const Check& check) {
  const Catalog& catalog = *conversion.plan.catalog;
  if (catalog.checkpoints().empty()) check(catalog);
  for (const auto& each : catalog.checkpoints()) check(*each);
}

// Returns false for members of a config that do not affect values of tensors, or that are checked
// elsewhere.
bool is_compared(const std::string& key) {
  constexpr std::string_view others =
      "_name_or_path _diffusers_version architectures dtype torch_dtype transformers_version";
  return !is_word(key, others) && std::ranges::count(quantization_members, key) == 0;
}

std::string declared_dtype(std::string_view config) {
  const std::string dtype = string_member(config, "dtype");
  return dtype.empty() ? string_member(config, "torch_dtype") : dtype;
}

// Warns of members that differ between the folder's config and the output's.
void compare_configs(std::string_view found, const Conversion& conversion, TargetPlace& place) {
  const std::string& own = conversion.config;
  std::vector<std::string> keys = different_members(found, own);
  std::erase_if(keys, [](const std::string& key) { return !is_compared(key); });
  if (declared_dtype(found) != declared_dtype(own)) keys.emplace_back("dtype");
  if (keys.empty() || string_member(own, "model_type").empty()) return;
  place.findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.config_stays",
       .message = "the folder keeps its config.json, which differs from the source's in " +
                  name_list(keys),
       .suggestion =
           "copy the source's config.json into the folder, or convert into a separate folder"});
}

// If the new output keeps an older output's config, requires that it agrees with the new output on
// encodings and ties. `folder`: the folder of the output's files.
void require_no_stale_config(WritableStorage& storage, const std::string& folder,
                             const Conversion& conversion, TargetPlace& place) {
  const auto config = [&](std::string_view name) -> std::optional<ExtraFile> {
    if (is_extra_name(conversion, std::string(name))) return std::nullopt;
    const std::string path = fmt::format("{}/{}", folder, name);
    const auto status = storage.status(path);
    if (!status || status->kind != EntryKind::file) return std::nullopt;
    return ExtraFile{.name = std::string(name), .copy_of = path};
  };
  const auto found = config("config.json");
  if (!found) return;
  ModelFolder beside = {.config = text_of(*found, storage)};
  if (auto claim = config(claim_name); claim && conversion.one_file) {
    beside.files.push_back(*std::move(claim));
  }
  const std::string_view claim = claiming_file(beside);
  if (!claim.empty() && !conversion.has_codes) {
    refuse_target(folder,
                  fmt::format("the folder has a {} that declares an encoding, and the output has "
                              "no file to replace it: remove the file or its section",
                              claim));
  }
  if (claim.empty() && conversion.has_codes) {
    refuse_target(
        folder,
        "the folder has a config.json that declares no encoding, but the output contains codes and "
        "no config.json to replace it: remove the file, or convert a folder to a folder");
  }
  const std::string& own = conversion.config;
  const bool is_known = !own.empty() && is_json_object(beside.config);
  const auto keys = is_known ? different_members(beside.config, own) : std::vector<std::string>();
  const std::string_view section = quantization_members.front();
  if (conversion.has_codes && has_member(own, section) && std::ranges::count(keys, section) > 0) {
    refuse_target(folder,
                  "the folder has a config.json that declares a different encoding than the "
                  "output's, and the output has no config.json to replace it: remove the file, or "
                  "convert a folder to a folder",
                  printable(object_member(beside.config, section)));
  }
  const auto head = untied_head(conversion.plan, beside.config);
  if (head && !conversion.has_tie) {
    refuse_target(folder,
                  "the folder has a config.json that ties two names (tie_word_embeddings), but the "
                  "output has a tensor for each name and no config.json to replace it: remove the "
                  "file, or correct it",
                  printable(*head));
  }
  if (is_known) compare_configs(beside.config, conversion, place);
}

// Returns true for files of an older output to remove with it, because they declare its encoding or
// that it is an adapter.
bool declares_other(const Conversion& conversion, std::string_view name) {
  return is_claim(name) || (name == adapter_config_name && !is_adapter(*conversion.plan.catalog));
}

// Returns true for files that libraries would load instead of the output, or on top of it.
bool is_other_model(const Conversion& conversion, std::string_view name) {
  const Container& container = container_of(conversion.format);
  if (container.is_model_name(name)) return true;
  if (container.index_suffix().empty()) return false;
  constexpr std::string_view variant = ".safetensors.index.";
  return name.find(variant) != std::string_view::npos ||
         (name == "adapter_model.bin" && !is_adapter(*conversion.plan.catalog));
}

// Warns of companion files of an older model that libraries would read with the new one.
void tell_companions(const Conversion& conversion, TargetPlace& place) {
  const auto has_weights = [](const std::string& name) {
    return starts_with_word(name, "pytorch_model tf_model flax_model");
  };
  const bool is_new = place.older.empty() && std::ranges::none_of(place.others, has_weights);
  if (is_new || !is_extra_name(conversion, "config.json")) return;
  std::vector<std::string> names;
  std::ranges::copy_if(place.others, std::back_inserter(names), [&](const std::string& name) {
    return (is_usual_companion(name) || has_weights(name)) && !is_extra_name(conversion, name);
  });
  if (names.empty()) return;
  place.findings.push_back({.severity = Severity::warning,
                            .code = "convert.config_stays",
                            .sources = names,
                            .message = "the folder keeps files that do not belong to the new "
                                       "model, and libraries read them together with it: " +
                                       name_list(names),
                            .suggestion = "if they belong to an older model, remove them"});
}

// Classifies the files in the target's folder. An older output is removed when the new one is
// complete; a model from a different program stays. `inside`: the folder in which shards wait to be
// moved one at a time.
void check_folder(WritableStorage& storage, TargetPlace& place, const Conversion& conversion,
                  const std::string& inside) {
  const Container& container = container_of(conversion.format);
  const std::string finished = inside + "/files/";
  std::vector<std::string> names;
  if (const int problem = storage.try_list(place.path, names)) {
    fail_write(problem, "the system cannot list the folder", place.path);
  }
  std::ranges::sort(names);
  bool only_files = true;
  for (const std::string& name : names) {
    place.has_files = true;
    const auto status = storage.status(place.path + "/" + name);
    // Folders of the output's modules belong to an older output and are removed with it.
    const bool is_folder = status && status->kind == EntryKind::folder;
    if (is_folder && is_extra_folder(conversion, storage, place.path, name)) continue;
    if (!is_folder && has_folder(conversion, name)) {
      refuse_target(place.path, "a file has the same name as a folder next to the model",
                    printable(name));
    }
    only_files = only_files && status && status->kind == EntryKind::file;
    if (is_folder && container.is_output_name(name, conversion.stem)) {
      refuse_target(place.path, "a folder has the name of a file of the output", printable(name));
    }
    if (container.is_model_name(name) &&
        same_file(storage, place.path + "/" + name, finished + name)) {
      place.named.push_back(name);
      continue;
    }
    const bool is_old_claim = !conversion.is_split && !is_extra_name(conversion, name) &&
                              declares_other(conversion, name);
    if (is_old_claim || container.is_output_name(name, conversion.stem)) {
      place.older.push_back(name);
      continue;
    }
    if (is_other_model(conversion, name) && !conversion.is_split) {
      refuse_target(place.path, "the folder already contains another model", printable(name));
    }
    if (name == "config.json" && !conversion.is_split) {
      require_no_stale_config(storage, place.path, conversion, place);
    }
    place.others.push_back(name);
  }
  place.is_exchangeable = place.has_files && only_files && !place.is_fixed;
  tell_companions(conversion, place);
}

// Checks the folder of a single file, which becomes the folder's model if it has a name that
// libraries look for.
void check_parent(WritableStorage& storage, const Conversion& conversion, TargetPlace& place) {
  const std::string name = fs::path(place.path).filename().string();
  if (std::ranges::find(usual_files, name) == usual_files.end()) return;
  const std::string index =
      name.substr(0, name.rfind('.')) + std::string(safetensors_container.index_suffix());
  if (storage.status(place.parent + "/" + index)) {
    refuse_target(place.path, "the folder already contains another model", index);
  }
  require_no_stale_config(storage, place.parent, conversion, place);
}

}  // namespace

// Checks a target whose shards get the target's name and a number, in a folder that keeps all other
// files.
static TargetPlace look_at_split(WritableStorage& storage, const Conversion& conversion,
                                 TargetPlace place) {
  place.exists = place.is_fixed = place.has_files = true;
  check_folder(storage, place, conversion, place.work);
  for_each_source(conversion, [&](const Catalog& catalog) {
    for (const std::string& name : place.older) {
      require_another(storage, catalog, place.path + "/" + name);
    }
  });
  return place;
}

// Rejects the name of a file if the conversion writes a folder or the other format.
static void check_name(const Conversion& conversion, const std::string& target) {
  const auto format = format_of_target(target);
  if (!format) return;
  const bool is_file = conversion.one_file || conversion.is_split;
  if (is_file && *format == conversion.format) return;
  const std::string_view written = name(conversion.format);
  throw Error("convert.target",
              fmt::format("the target has the name of a {} file, but the conversion writes {}",
                          name(*format), is_file ? fmt::format("a {} file", written) : "a folder"),
              {.path = target,
               .expected = is_file ? fmt::format("NAME.{}, or ConvertOptions::format {}", written,
                                                 name(*format))
                                   : "a folder, or ConvertOptions::one_file"});
}

TargetPlace look_at_target(const Conversion& conversion, const std::string& target,
                           WritableStorage& storage) {
  check_name(conversion, target);
  TargetPlace place = place_of(conversion, target, storage);
  if (conversion.is_split) return look_at_split(storage, conversion, std::move(place));
  for_each_source(conversion, [&](const Catalog& each) { check_not_source(storage, each, place); });
  if (conversion.one_file) check_parent(storage, conversion, place);
  const auto status = storage.status(place.path);
  place.exists = status.has_value();
  if (!status) return place;
  const bool is_folder =
      storage.status(place.path, true).value_or(*status).kind == EntryKind::folder;
  if (conversion.one_file && status->kind != EntryKind::file) {
    refuse_target(place.path, "a folder or another object already has this name");
  }
  if (conversion.one_file && status->is_mount_point) {
    refuse_target(place.path,
                  "the target is a mount point, which the system cannot replace: mount its folder, "
                  "or choose a different target");
  }
  if (!conversion.one_file && !is_folder) {
    refuse_target(place.path, "a file or another object already has this name");
  }
  if (!conversion.one_file) {
    // A link to a folder and the root of a file system cannot be replaced, so files are moved into
    // them. If the working folder of this process were replaced, the caller's shell would be in a
    // removed folder.
    const FileStatus here = storage.status(".").value_or(FileStatus());
    place.is_fixed = status->kind == EntryKind::link || status->is_mount_point ||
                     same_file(here, *status) ||
                     status->identity.device !=
                         storage.status(place.parent, true).value_or(*status).identity.device;
    place.has_files = place.is_fixed;
    check_folder(storage, place, conversion, work_inside(place));
    if (place.has_files && !place.is_exchangeable) place.work = work_inside(place);
  }
  return place;
}

std::optional<FileFormat> format_of_target(std::string_view target) {
  return only_errors([&]() -> std::optional<FileFormat> {
    for (const Container* const container : containers()) {
      if (target.ends_with(container->suffix())) return container->format();
    }
    const std::string lower = lowered(target);
    constexpr std::string_view endings = ".gguf .bin .pt .pth .ckpt .safetensors";
    for_each_word(endings, [&](std::string_view ending) {
      if (!lower.ends_with(ending)) return;
      throw Error(
          "convert.target",
          fmt::format("the target has the name of a {} file, but loadstone writes only safetensors "
                      "and GGUF",
                      ending.substr(1)),
          {.path = std::string(target), .expected = "NAME.safetensors, NAME.gguf or a folder"});
    });
    return std::nullopt;
  });
}

// Warns of a vocabulary that safetensors cannot store, if the output's folder has no tokenizer.
static void report_lost_vocabulary(WritableStorage& storage, const Conversion& conversion,
                                   TargetPlace& place) {
  const std::string key = "tokenizer.ggml.tokens";
  const Metadata& before = conversion.plan.catalog->metadata();
  if (!before.contains(key) || conversion.metadata.contains(key)) return;
  const auto names = storage.list(conversion.one_file ? place.parent : place.path);
  if (std::ranges::any_of(conversion.extras, is_vocabulary, &ExtraFile::name) ||
      std::ranges::any_of(names, is_vocabulary)) {
    return;
  }
  place.findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.metadata",
       .sources = {key},
       .message = "the output lacks the vocabulary: safetensors files cannot store it, and the "
                  "output folder has no tokenizer file",
       .suggestion =
           "copy tokenizer.json or tokenizer.model of the original model into the output folder"});
}

std::vector<Finding> check_target_in(WritableStorage& storage, const Conversion& conversion,
                                     const std::string& target, const ConvertRun& run) {
  std::string difference;
  const TargetPlace named = place_of(conversion, target, storage);
  if (auto finding = finished_earlier(conversion, named, run, storage, difference)) {
    return {*std::move(finding)};
  }
  TargetPlace place = look_at_target(conversion, target, storage);
  tell_replaced(conversion, difference, run, storage, place);
  report_lost_vocabulary(storage, conversion, place);
  check_extras(conversion, storage);
  for (const OutputFile& file : conversion.files) {
    check_file_limit(file.byte_count(),
                     file.name.empty() ? place.path : place.path + "/" + file.name);
  }
  std::vector<bool> wanted;
  std::uint64_t bytes = 0;
  if (run.part) {
    wanted.resize(conversion.files.size(), false);
    for (const std::uint32_t file : files_of_part(conversion, *run.part)) {
      wanted[file] = true;
      bytes += conversion.files[file].byte_count();
    }
  } else {
    bytes = conversion.bytes_to_write + extra_bytes(conversion, storage);
  }
  const std::uint64_t waiting = bytes_waiting(storage, conversion, place.work, wanted);
  const auto free = storage.free_bytes(place.has_files ? place.path : place.parent);
  if (auto finding =
          space_finding("the target", place.path, bytes - std::min(bytes, waiting), free)) {
    place.findings.push_back(*std::move(finding));
  }
  sort_findings(place.findings);
  return std::move(place.findings);
}

std::vector<Finding> check_target(const Conversion& conversion, const std::string& target,
                                  const ConvertRun& run) {
  return only_errors([&] {
    WritableStorage& storage = catalog_of(conversion.plan).storage().writable();
    std::vector<Finding> findings = check_target_in(storage, conversion, target, run);
    const bool is_done = std::ranges::any_of(findings, [](const Finding& each) {
      return each.code == complete_code || each.severity == Severity::error;
    });
    if (is_done) return findings;
    const TargetPlace place = look_at_target(conversion, target, storage);
    if (auto resumed = resumed_work(conversion, place, run, storage)) {
      findings.push_back(*std::move(resumed));
      sort_findings(findings);
    }
    return findings;
  });
}

}  // namespace loadstone
