// Compares files with a receipt: every byte by its digest, and headers of outputs by their
// contents.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/only_errors.h"
#include "base/text.h"
#include "catalog/assembled_file.h"
#include "catalog/locate_remote.h"
#include "catalog/paths.h"
#include "convert/write/extras.h"
#include "engine/jobs.h"
#include "formats/dcp_metadata.h"
#include "formats/gguf_shapes.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "loadstone/verify.h"
#include "receipt/file_digest.h"
#include "receipt/receipt_file.h"

namespace loadstone {

namespace {

namespace fs = std::filesystem;

// ---- the list of tensors and the headers of the files

// Returns a text such as "source 'in/model.safetensors'".
std::string side_text(bool is_output, std::string_view path) {
  return fmt::format("{} '{}'", is_output ? "output" : "source", printable(path, 400));
}

std::string place_text(std::uint64_t begin, std::uint64_t end) {
  return fmt::format("bytes {} to {}", begin, end);
}

// A folded GGUF tensor has the model's shape in the catalog, and the file's rows in the receipt.
bool is_folded(const Catalog& catalog, const TensorInfo& found, const Shape& shape) {
  return catalog.metadata().contains(std::string(gguf_shape_prefix) + found.name) &&
         found.shape.numel() == shape.numel();
}

// Adds the first property in which the two tensors differ.
void compare_tensor(const Catalog& catalog, const TensorInfo& found, const ReceiptTensor& expected,
                    std::vector<Difference>& differences) {
  const Shape shape(expected.shape);
  if (found.encoding.name() != expected.encoding) {
    differences.push_back({expected.name, DifferenceKind::encoding,
                           std::string(found.encoding.name()), printable(expected.encoding)});
  } else if (found.shape != shape && !is_folded(catalog, found, shape)) {
    differences.push_back({expected.name, DifferenceKind::shape, found.shape.text(), shape.text()});
  } else if (found.offset_begin != expected.begin || found.offset_end != expected.end) {
    differences.push_back({expected.name, DifferenceKind::bytes,
                           place_text(found.offset_begin, found.offset_end),
                           place_text(expected.begin, expected.end)});
  }
}

// Opens each checkpoint once. Not thread-safe.
class ReceiptHeaders {
 public:
  explicit ReceiptHeaders(Storage& storage) : storage_(storage) {}

  // Adds a difference for each tensor that is in only one of both lists, or whose dtype, shape or
  // offset differs; `is_whole`: the receipt lists all tensors of the file. A file without listed
  // tensors has one digest of all its bytes, and is not opened.
  void compare(const ReceiptFile& file, const std::string& path, bool is_whole,
               std::vector<Difference>& differences);

 private:
  const Catalog& catalog_of(const std::string& path);

  Storage& storage_;
  std::map<std::string, std::shared_ptr<const Catalog>> catalogs_;  // by the path of each shard
};

// The parts of a split GGUF are one catalog.
const Catalog& ReceiptHeaders::catalog_of(const std::string& path) {
  const auto known = catalogs_.find(path);
  if (known != catalogs_.end()) return *known->second;
  const auto catalog = open_checkpoint(
      path, {.allow_links = true, .gguf_rank_max = defaults::gguf_rank_most, .storage = &storage_});
  for (const Shard& shard : catalog->shards()) catalogs_.try_emplace(shard.path, catalog);
  return *catalogs_.try_emplace(path, catalog).first->second;
}

void ReceiptHeaders::compare(const ReceiptFile& file, const std::string& path, bool is_whole,
                             std::vector<Difference>& differences) {
  if (file.tensors.empty()) return;
  std::map<std::string_view, const TensorInfo*> found;
  const Catalog* catalog = nullptr;
  try {
    catalog = &catalog_of(path);
    const bool is_one = catalog->shards().size() == 1;
    for (const TensorInfo& tensor : catalog->tensors()) {
      if (is_one || catalog->shards()[tensor.shard].path == path) found[tensor.name] = &tensor;
    }
  } catch (const Error& error) {
    differences.push_back({file.path + " (header)", DifferenceKind::bytes,
                           fmt::format("{} in {}", error.what(), side_text(is_whole, path)),
                           "a header with the tensors that the receipt lists"});
    return;
  }
  std::set<std::string_view> listed;  // a tensor of a source may be listed several times
  for (const ReceiptTensor& tensor : file.tensors) {
    const auto own = found.find(tensor.name);
    const bool is_new = listed.insert(tensor.name).second;
    if (own == found.end() || (is_whole && !is_new)) {
      differences.push_back(
          {tensor.name, DifferenceKind::missing,
           fmt::format("no tensor with this name in {}", side_text(is_whole, path)),
           "a tensor that the receipt lists once"});
      continue;
    }
    if (is_new) compare_tensor(*catalog, *own->second, tensor, differences);
  }
  if (!is_whole) return;
  for (const auto& [name, tensor] : found) {
    if (listed.contains(name)) continue;
    differences.push_back({std::string(name), DifferenceKind::unexpected,
                           fmt::format("a tensor in {}", side_text(is_whole, path)),
                           "no entry in the receipt"});
  }
}

// ---- digests

// A digest to compute again.
struct Check {
  std::shared_ptr<ByteSource> file;
  std::string name;  // name to report in a difference
  std::string side;  // "source 'in/model.safetensors'"
  std::uint64_t begin = 0;
  std::vector<ByteRange> ranges;
  std::string digest;
  bool is_header = false;
};

struct Listed {
  const ReceiptFile* file;
  std::string path;
  bool is_output;
};

class ReceiptCheck {
 public:
  ReceiptCheck(const Receipt& receipt, const VerifyOptions& options)
      : receipt_(receipt),
        options_(options),
        storage_(options.storage != nullptr ? *options.storage : local_storage()),
        headers_(storage_) {}

  void add_files(const std::vector<ReceiptFile>& files, const std::string& given,
                 std::uint32_t checkpoint, bool is_output) {
    // Resolves a hub's branch once, so that all files are from one commit.
    std::string root = is_remote(given) ? storage_.resolve(given) : given;
    bool is_folder = storage_.kind(root) == EntryKind::folder;
    const bool is_set = !is_folder && is_output && is_split_part(files, root);
    if (is_set) {
      root = parent_path(root);
      is_folder = true;
    }
    std::size_t count = 0;
    for (const ReceiptFile& file : files) {
      if (!is_output && file.checkpoint != checkpoint) continue;
      // A config, which is next to the file with the tensors.
      const bool is_config = !is_output && file.tensors.empty();
      if (!is_config) ++count;
      const std::string path = is_folder   ? join_path(root, file.path)
                               : is_config ? join_path(parent_path(root), file.path)
                                           : root;
      const std::string side = side_text(is_output, path);
      const auto source = opened(file, path, side);
      if (source == nullptr) continue;
      // The tensors of a training checkpoint are assembled from other files.
      if (!is_output && fs::path(path).filename() == dcp_metadata_name) {
        const auto catalog = open_checkpoint(path, {.storage = &storage_});
        add_file(file, open_shard(storage_, *catalog, 0), shard_bytes(*catalog, 0), side);
      } else {
        add_file(file, source, source->identity().bytes, side);
        files_.push_back({&file, path, is_output});
      }
    }
    if (count == 0) {
      throw Error("usage",
                  is_output ? "the receipt was written by a load, which wrote no files: pass the "
                              "checkpoint that was loaded"
                            : fmt::format("the receipt does not list source {}: pass fewer "
                                          "sources",
                                          checkpoint + 1),
                  {.path = root});
    }
    if (!is_folder && count > 1) {
      throw Error("usage",
                  fmt::format("the receipt lists several files of the {}: pass their folder",
                              is_output ? "output" : "source"),
                  {.path = root, .found = counted(count, "file")});
    }
    if (is_output && is_folder && !is_set) add_unexpected(files, root);
  }

  // Adds a note for each source checkpoint of the receipt, except the first `compared` ones.
  void note_left_out(std::size_t compared) {
    std::map<std::uint32_t, std::vector<std::string>> left_out;
    for (const ReceiptFile& file : receipt_.sources) {
      if (file.checkpoint >= compared) left_out[file.checkpoint].push_back(file.path);
    }
    for (const auto& [checkpoint, paths] : left_out) {
      notes_.push_back(
          {.code = "verify.not_compared",
           .sources = paths,
           .message = fmt::format("source {} of the receipt was not compared: {}", checkpoint + 1,
                                  name_list(paths)),
           .suggestion =
               "pass it too (--source): each source once, in the order of the conversion"});
    }
  }

  VerifyReport run() {
    std::vector<std::string> found(checks_.size());
    std::uint64_t total = 0;
    for (const Check& check : checks_) {
      for (const ByteRange& range : check.ranges) total += range.size();
    }
    unsigned threads = options_.threads;
    for (const Check& check : checks_) {
      if (options_.threads == 0) threads = std::max(threads, check.file->reads_at_once());
    }
    Jobs jobs(threads, options_.observer, total);
    const auto goes_on = [&](std::uint64_t bytes) { return jobs.goes_on(bytes); };
    jobs.run(checks_.size(), [&](std::size_t i, std::vector<std::byte>&) {
      const Check& check = checks_[i];
      found[i] = file_digest(receipt_.kind, *check.file, check.begin, check.ranges, goes_on);
    });
    VerifyReport report;
    report.bytes_read = jobs.bytes_done();
    report.differences = std::move(missing_files_);
    std::ranges::move(differences_, std::back_inserter(report.differences));
    report.findings = std::move(notes_);
    for (std::size_t i = 0; i < checks_.size(); ++i) {
      const Check& check = checks_[i];
      if (found[i] == check.digest) continue;
      files_hold_ = files_hold_ && !check.is_header;
      report.differences.push_back({check.name, DifferenceKind::bytes,
                                    fmt::format("{} in {}", found[i], check.side), check.digest});
    }
    // A different header is already reported.
    if (!files_hold_) return report;
    for (const Listed& each : files_) {
      headers_.compare(*each.file, each.path, each.is_output, report.differences);
    }
    return report;
  }

 private:
  // Returns true for a part of a split GGUF, which means all parts and no other file of its folder.
  static bool is_split_part(const std::vector<ReceiptFile>& files, const std::string& path) {
    const std::string_view name = file_name(path);
    return files.size() > 1 && name.ends_with(".gguf") &&
           std::ranges::count(files, name, &ReceiptFile::path) > 0;
  }

  // Returns null and adds a difference if the file is missing.
  std::shared_ptr<ByteSource> opened(const ReceiptFile& file, const std::string& path,
                                     const std::string& side) {
    try {
      return storage_.open(path);
    } catch (const Error& error) {
      if (error.code() != "io.not_found") throw;
      files_hold_ = false;
      missing_files_.push_back({file.path, DifferenceKind::missing, "no " + side,
                                "a file of " + counted(file.bytes, "byte"), true});
      return nullptr;
    }
  }

  void add_file(const ReceiptFile& file, const std::shared_ptr<ByteSource>& source,
                std::uint64_t bytes, const std::string& side) {
    if (bytes != file.bytes) {
      files_hold_ = false;
      differences_.push_back({file.path, DifferenceKind::bytes,
                              fmt::format("{} in {}", counted(bytes, "byte"), side),
                              counted(file.bytes, "byte")});
    }
    const auto add = [&](std::string name, std::uint64_t begin, std::vector<ByteRange> ranges,
                         const std::string& digest, bool is_header) {
      if (!ranges.empty() && begin + ranges.back().end > bytes) {
        differences_.push_back({std::move(name), DifferenceKind::missing, "an end of " + side,
                                fmt::format("bytes up to {}", begin + ranges.back().end)});
        return;
      }
      checks_.push_back(
          {source, std::move(name), side, begin, std::move(ranges), digest, is_header});
    };
    const bool is_all = file.tensors.empty();
    add(is_all ? file.path : file.path + " (header)", 0, file.header_ranges, file.header_digest,
        true);
    for (const ReceiptTensor& tensor : file.tensors) {
      add(tensor.name, tensor.begin, ranges_of(tensor), tensor.digest, false);
    }
  }

  // The receipt itself may have any name; it is identified by its contents.
  void add_unexpected(const std::vector<ReceiptFile>& files, const std::string& root) {
    std::set<std::string> known;
    std::set<std::string> folders;
    for (const ReceiptFile& file : files) {
      known.insert(file.path);
      for_each_folder(file.path, [&](std::string folder) { folders.insert(std::move(folder)); });
    }
    const auto add_in = [&](const auto& self, const std::string& below) -> void {
      for (const std::string& name : names_in(below.empty() ? root : join_path(root, below))) {
        const std::string path = join_path(below, name);
        if (known.contains(path) || (below.empty() && name.ends_with(receipt_file_name))) continue;
        if (is_own_name(name)) continue;
        if (folders.contains(path) && storage_.kind(join_path(root, path)) == EntryKind::folder) {
          self(self, path);
        } else {
          differences_.push_back({path, DifferenceKind::unexpected, "a file", "nothing"});
        }
      }
    };
    add_in(add_in, {});
  }

  // Returns an empty list if a remote host cannot list the folder.
  std::vector<std::string> names_in(const std::string& root) {
    if (!is_remote(root)) return storage_.list(root);
    return list_remote(storage_, root).value_or(std::vector<std::string>());
  }

  const Receipt& receipt_;
  const VerifyOptions& options_;
  Storage& storage_;
  ReceiptHeaders headers_;
  std::vector<Check> checks_;
  std::vector<Listed> files_;  // files that exist
  bool files_hold_ = true;     // sizes and headers match the receipt
  std::vector<Difference> missing_files_;
  std::vector<Difference> differences_;  // all others
  std::vector<Finding> notes_;
};

}  // namespace

VerifyReport verify_receipt(const Receipt& receipt, const std::string& output,
                            const std::vector<std::string>& sources, const VerifyOptions& options) {
  return only_errors([&] {
    if (output.empty() && sources.empty()) {
      throw Error("usage",
                  "a receipt is compared with files: pass its output, its sources, or both");
    }
    ReceiptCheck check(receipt, options);
    if (!output.empty()) check.add_files(receipt.outputs, output, 0, true);
    for (std::uint32_t i = 0; i < sources.size(); ++i) {
      check.add_files(receipt.sources, sources[i], i, false);
    }
    if (!sources.empty()) check.note_left_out(sources.size());
    return check.run();
  });
}

}  // namespace loadstone
