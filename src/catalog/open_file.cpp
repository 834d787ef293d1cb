#include "catalog/open_file.h"

#include <string_view>

#include "catalog/paths.h"
#include "formats/gguf.h"
#include "formats/safetensors.h"
#include "formats/sniff.h"
#include "formats/torch.h"

namespace loadstone {

namespace {

// Returns true if `folder` is a snapshot in a hub cache, and `file` is one of the cache's blobs.
// The cache stores files in MODEL/blobs and links to them from MODEL/snapshots/REVISION. `folder`
// must be resolved.
bool is_hub_blob(std::string_view file, std::string_view folder) {
  constexpr std::string_view snapshots = "/snapshots/";
  const std::size_t at = folder.rfind(snapshots);
  if (at == std::string_view::npos) return false;
  return is_below(file, std::string(folder.substr(0, at)) + "/blobs");
}

[[noreturn]] void refuse_format(const ByteSource& source, FileKind kind) {
  refuse(source.path(),
         {"format.unknown", "the file is not a checkpoint in a format that loadstone reads", "file",
          std::string(describe(kind)), "safetensors, GGUF or torch"});
}

}  // namespace

std::shared_ptr<ByteSource> FileOpener::open(const std::string& path,
                                             const std::string& folder) const {
  if (!allow_links) {
    const std::string real = storage.resolve(path);
    const std::string home = storage.resolve(folder);
    if (!is_below(real, home) && !is_hub_blob(real, home)) {
      refuse(path, {"ix.path_escape",
                    "a link leads out of the checkpoint's folder (to follow it, pass "
                    "--allow-links, allow_links=True)",
                    "file", "'" + real + "'", "a file below '" + home + "'"});
    }
  }
  try {
    return storage.open_anew(path);
  } catch (const Error& error) {
    if (error.code() != "io.not_regular") throw;
    Where where = error.where();
    where.field = "file";
    throw Error("ix.not_regular", error.message(), std::move(where));
  }
}

FileHeader read_header(ByteSource& source, std::uint32_t gguf_rank_max) {
  const std::string_view name = source.path();
  if (name.ends_with(".safetensors")) return read_safetensors(source);
  if (name.ends_with(".gguf")) return read_gguf(source, gguf_rank_max);
  const FileKind kind = sniff(source);
  if (kind == FileKind::safetensors) return read_safetensors(source);
  if (kind == FileKind::gguf || kind == FileKind::legacy_ggml)
    return read_gguf(source, gguf_rank_max);
  const bool is_torch = kind == FileKind::torch_zip || kind == FileKind::torch_pickle;
  if (is_torch || is_torch_name(name)) return read_torch(source);
  refuse_format(source, kind);
}

}  // namespace loadstone
