#include "formats/document.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/only_errors.h"
#include "formats/sniff.h"
#include "loadstone/error.h"
#include "storage/remote_path.h"
#include "storage/whole_file.h"

namespace loadstone {

namespace {

// Shorter files contain no weights, because the length field of a safetensors file takes 8 bytes.
constexpr std::uint64_t short_file_bytes = 8;

// Name endings of JSON files that libraries read next to weights, such as "adapter_config.json".
constexpr std::string_view model_endings[] = {"config.json",      "index.json",
                                              "tokenizer.json",   "modules.json",
                                              "vocab.json",       "special_tokens_map.json",
                                              "added_tokens.json"};

bool is_document(FileKind kind) noexcept {
  return kind == FileKind::text || kind == FileKind::html;
}

[[noreturn]] void fail(const std::string& path, std::string_view found) {
  throw Error("io.exists", "loadstone does not replace this file",
              {.path = path,
               .found = std::string(found),
               .expected = "the name of a new file, or of an earlier document of the same kind"});
}

void require(const std::string& path) {
  if (is_remote(path)) return;
  WritableStorage& storage = local_storage().writable();
  FileStatus status;
  if (storage.try_status(path, true, status) != 0 || status.kind != EntryKind::file) return;
  if (status.identity.bytes == 0) return;
  const std::string real = storage.real_path(path);  // a link's target may have any name
  const auto is_of_model = [](std::string_view name) {
    return std::ranges::any_of(model_endings,
                               [&](std::string_view ending) { return name.ends_with(ending); });
  };
  if (is_of_model(path) || is_of_model(real)) fail(path, "a file of a model");
  if (status.identity.bytes < short_file_bytes) return;
  const FileKind kind = sniff(*local_storage().open(path));
  if (!is_document(kind)) fail(path, describe(kind));
}

}  // namespace

void require_document(const std::string& path) {
  only_errors([&] { require(path); });
}

void write_document(const std::string& path, std::string_view text) {
  only_errors([&] {
    require(path);
    write_whole_file(path, text);
  });
}

}  // namespace loadstone
