#include "convert/write/extras.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "base/words.h"
#include "catalog/config_claim.h"
#include "catalog/config_file.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "convert/json_text.h"
#include "convert/output_recipes.h"
#include "convert/write/container.h"
#include "convert/write/files.h"
#include "convert/write/state.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::uint64_t copy_bytes = 1 << 20;

[[noreturn]] void refuse_extra(std::string path, std::string message, std::string found = {}) {
  throw Error("convert.extra", std::move(message),
              {.path = std::move(path), .found = std::move(found)});
}

// Opens the file that is to be copied; returns null if the content is text. Does not follow a link.
std::shared_ptr<ByteSource> source_of(const ExtraFile& extra, WritableStorage& storage) {
  if (extra.copy_of.empty() || extra.source) return extra.source;
  std::shared_ptr<ByteSource> file;
  const int problem = storage.open(extra.copy_of, file);
  if (problem == ELOOP) refuse_extra(extra.copy_of, "loadstone does not copy links");
  if (problem == ENXIO || problem == EISDIR) {
    refuse_extra(extra.copy_of, "loadstone copies only regular files");
  }
  if (problem == 0) return file;
  const char* const code = problem == ENOENT   ? "io.not_found"
                           : problem == EACCES ? "io.denied"
                                               : "io.open";
  throw Error(code, "the system cannot open the file to copy",
              {.path = extra.copy_of, .system_error = problem});
}

std::uint64_t bytes_of(const ExtraFile& extra, WritableStorage& storage) {
  const auto source = source_of(extra, storage);
  const std::uint64_t bytes = source ? source->identity().bytes : extra.text.size();
  if (source && bytes > extra_bytes_max) {
    refuse_extra(extra.copy_of, "the file is too large for a companion file", human_bytes(bytes));
  }
  return bytes;
}

// Passes all bytes of the copied file to `take`. Returns their number.
template <typename Take>
std::uint64_t read_all(const ExtraFile& extra, WritableStorage& storage, const Take& take) {
  const auto source = source_of(extra, storage);
  const FileIdentity before = source->identity();
  std::vector<std::byte> buffer(std::min<std::uint64_t>(before.bytes, copy_bytes));
  try {
    for (std::uint64_t done = 0; done < before.bytes;) {
      const auto some = std::span(buffer).first(std::min(before.bytes - done, copy_bytes));
      source->read(done, some);
      take(done, std::span<const std::byte>(some));
      done += some.size();
    }
    const FileIdentity after = source->identity();
    if (after.bytes == before.bytes && after.modified_ns == before.modified_ns) return after.bytes;
  } catch (const Error& error) {
    if (error.code() != "io.short_read") throw;
  }
  throw Error("io.changed", "the file changed while it was copied", {.path = extra.copy_of});
}

void add_content(const ExtraFile& extra, WritableStorage& storage, Digest& digest) {
  add_text(digest, extra.text);
  if (extra.copy_of.empty()) return;
  const auto add = [&](std::uint64_t /*at*/, std::span<const std::byte> piece) {
    digest.update(piece);
  };
  add_number(digest, read_all(extra, storage, add));
}

}  // namespace

void check_extras(const Conversion& conversion, WritableStorage& storage) {
  std::set<std::string_view> names;
  const auto is_model = [&](const std::string& name) {
    return name.find('/') == std::string::npos &&
           container_of(conversion.format).is_model_name(name);
  };
  if (conversion.one_file && !conversion.extras.empty()) {
    refuse_extra({}, "a single file cannot have companion files: pass a folder");
  }
  for (const ExtraFile& extra : conversion.extras) {
    if (!is_path_below(extra.name)) {
      refuse_extra({}, "this is not a valid name for a file in the target", printable(extra.name));
    }
    if (is_model(extra.name)) {
      refuse_extra({}, "a companion file has the same name as a file of the model",
                   printable(extra.name));
    }
    if (!names.insert(extra.name).second) {
      refuse_extra({}, "two companion files have the same name", printable(extra.name));
    }
    static_cast<void>(bytes_of(extra, storage));
  }
  for (const ExtraFile& extra : conversion.extras) {
    for_each_folder(extra.name, [&](const std::string& folder) {
      const bool is_taken = names.contains(folder) || is_model(folder);
      if (is_taken) refuse_extra({}, "a file and a folder have the same name", printable(folder));
    });
  }
}

std::uint64_t extra_bytes(const Conversion& conversion, WritableStorage& storage) {
  std::uint64_t bytes = 0;
  for (const ExtraFile& extra : conversion.extras) bytes += bytes_of(extra, storage);
  return bytes;
}

bool is_extra_name(const Conversion& conversion, const std::string& name) noexcept {
  return std::ranges::find(conversion.extras, name, &ExtraFile::name) != conversion.extras.end();
}

bool has_folder(const Conversion& conversion, const std::string& name) noexcept {
  return std::ranges::any_of(conversion.extras, [&](const ExtraFile& extra) {
    return extra.name.size() > name.size() && extra.name.starts_with(name) &&
           extra.name[name.size()] == '/';
  });
}

bool is_extra_folder(const Conversion& conversion, WritableStorage& storage,
                     const std::string& path, const std::string& name) {
  const std::vector<std::string> below = paths_below(storage, path + "/" + name);
  return !below.empty() && std::ranges::all_of(below, [&](const std::string& each) {
    return is_extra_name(conversion, name + "/" + each);
  });
}

void add_extras(const Conversion& conversion, WritableStorage& storage, Digest& digest) {
  for (const ExtraFile& extra : conversion.extras) {
    add_text(digest, extra.name);
    add_content(extra, storage, digest);
  }
}

bool have_same_bytes(const ExtraFile& a, const ExtraFile& b, WritableStorage& storage) {
  if (bytes_of(a, storage) != bytes_of(b, storage)) return false;
  Digest first;
  Digest second;
  add_content(a, storage, first);
  add_content(b, storage, second);
  return first.hex() == second.hex();
}

std::string text_of(const ExtraFile& extra, WritableStorage& storage) {
  std::string text = extra.text;
  if (extra.copy_of.empty()) return text;
  const auto add = [&](std::uint64_t /*at*/, std::span<const std::byte> piece) {
    text += as_text(piece);
  };
  read_all(extra, storage, add);
  return text;
}

std::uint64_t write_extra(WritableStorage& storage, const ExtraFile& extra,
                          const std::string& path) {
  const auto file = storage.create(path);
  std::uint64_t bytes = extra.text.size();
  if (extra.copy_of.empty()) {
    file->write(0, std::as_bytes(std::span(extra.text)));
  } else {
    bytes = read_all(extra, storage, [&](std::uint64_t at, std::span<const std::byte> piece) {
      file->write(at, piece);
    });
  }
  file->sync();
  return bytes;
}

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
  // Errors in configs are ignored if the catalog has no codes that they could describe.
  const bool must_read = may_hold_codes(catalog);
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
          .message = fmt::format("{} declares that the checkpoint is quantized, but none of its "
                                 "tensors has a layout that this version of loadstone supports",
                                 printable(path)),
          .suggestion = fmt::format("if no tensor is quantized, remove {}", what)};
}

// Returns true if the file in the model's folder belongs to a source of the conversion.
static bool is_input(const Catalog& catalog, const std::string& name) {
  const auto& inputs = catalog.checkpoints();
  WritableStorage& storage = catalog.storage().writable();
  const std::string path =
      join_path(inputs.empty() ? catalog.root() : inputs.front()->root(), name);
  const auto is_shard = [&](const Shard& shard) {
    return shard.path == path || same_file(storage, shard.path, path);
  };
  return std::ranges::any_of(catalog.shards(), is_shard) ||
         std::ranges::any_of(inputs, [&](const auto& input) {
           return std::ranges::any_of(input->shards(), is_shard);
         });
}

// Removes the adapters from `others` and returns them. Adapters in other formats stay in `others`.
static std::vector<std::string> take_adapters(std::vector<std::string>& others,
                                              const Catalog& catalog) {
  const bool is_of_adapter = is_adapter(catalog);
  const auto found = std::ranges::stable_partition(others, [&](const std::string& name) {
    return !is_adapter_file(name) || (is_of_adapter && name.find('/') == std::string::npos);
  });
  std::vector<std::string> adapters(found.begin(), found.end());
  others.erase(found.begin(), found.end());
  return adapters;
}

// Returns true if the folder's configs refer to code: by "auto_map", or by classes of
// sentence-transformers that the folder defines.
static bool names_code(const ModelFolder& folder, WritableStorage& storage) {
  if (folder.config.find("\"auto_map\"") != std::string::npos) return true;
  const auto modules = std::ranges::find(folder.files, modules_name, &ExtraFile::name);
  if (modules == folder.files.end()) return false;
  const std::string text = text_of(*modules, storage);
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
  add(folder.links,
      "loadstone does not copy links; the folder has " + counted(folder.links.size(), "link"),
      "pass the folder that contains the files themselves");
  add(denied,
      "the host lacks, or denies access to, " + counted(denied.size(), "file") +
          " next to the model",
      "if the model needs them, copy them yourself");
  add(folder.left,
      "modules.json or model_index.json lists modules that this conversion does not copy",
      "if the model needs them, convert or copy them into the output");
  const bool needs_code = names_code(folder, catalog.storage().writable());
  add(folder.code,
      needs_code
          ? "the model's configs refer to Python code, but loadstone does not copy Python files"
          : "loadstone does not copy Python files",
      "to copy them, pass --copy-code (copy_code=True); a program that loads the model may run "
      "them",
      needs_code ? Severity::warning : Severity::info);
  std::vector<std::string> others = folder.others;
  std::erase_if(others, [&](const std::string& name) { return is_input(catalog, name); });
  add(take_adapters(others, catalog), "loadstone does not copy adapters in the model's folder",
      "merge them (--lora, lora=), or copy their folders yourself if the adapters are compatible "
      "with the output");
  add(others, "this conversion neither reads nor copies these weights",
      "if the model needs them, convert or copy them into the output", Severity::info);
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
                      .message = "loadstone does not copy files that declare the source's "
                                 "encoding, because the output has a different one: " +
                                 name_list(names)});
}

}  // namespace loadstone
