#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "catalog/config_claim.h"
#include "catalog/dcp_parts.h"
#include "catalog/for_each_file.h"
#include "catalog/index_check.h"
#include "catalog/locate.h"
#include "catalog/open_dcp.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "catalog/shard_metadata.h"
#include "catalog/transform_claim.h"
#include "codec/tensor_table.h"
#include "formats/dcp_metadata.h"
#include "formats/gguf.h"
#include "formats/gguf_shapes.h"
#include "formats/safetensors.h"
#include "formats/sharded_index.h"
#include "formats/torch.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr int invalid_file = 3;  // an exit_status()

// Returns true for codes that only the config explains, and for transforms of activations.
bool needs_claim(const TensorInfo& tensor) {
  const bool is_words = tensor.name.ends_with(".qweight") || tensor.name.ends_with("_packed");
  const bool is_of_mlx = tensor.name.ends_with(".weight") && is_dtype(tensor, {Dtype::u32});
  return is_fp8(tensor) || is_foreign_float(tensor) || is_dtype(tensor, {Dtype::i8, Dtype::u8}) ||
         (is_words && is_dtype(tensor, {Dtype::i32})) || is_of_mlx || may_be_transform(tensor.name);
}

// Names all missing files, so that users can copy them all at once.
Error missing_files(Where where, const std::vector<std::string>& missing,
                    std::string_view message) {
  where.found = no_files_text(missing);
  return Error("ix.missing_shard", std::string(message), std::move(where));
}

// Throws the first error, if there is one, with all others. `count`: the checkpoint's files.
void throw_first(std::vector<Error> errors, std::size_t count) {
  if (errors.empty()) return;
  const Error first = errors.front();
  if (errors.size() == 1) throw first;
  errors.erase(errors.begin());
  std::vector<std::string> names;
  for (const Error& each : errors) names.emplace_back(file_name(each.where().path));
  throw Error(first.code(),
              fmt::format("{} ({} more of {} files cannot be opened: {})", first.message(),
                          names.size(), count, name_list(names)),
              first.where(), std::move(errors));
}

// Rethrows the error of a shard with the name of the index that lists it.
[[noreturn]] void rethrow_as_shard(const Error& error, const std::string& index_path,
                                   bool at_open) {
  Where where = error.where();
  if (at_open) where.field = "weight_map";
  throw Error(error.code(),
              fmt::format("{} (a shard of '{}')", error.message(), file_name(index_path)),
              std::move(where));
}

// Not thread-safe; used once.
class CheckpointReader {
 public:
  CheckpointReader(Storage& storage, const OpenOptions& options)
      : opener_{storage, options.allow_links}, gguf_rank_max_(options.gguf_rank_max) {}

  std::shared_ptr<const Catalog> read(CheckpointFiles files) {
    root_ = files.root;
    if (files.index) {
      read_index(std::move(files));
      return finish();
    }
    report_ignored(files, {}, findings_);
    if (files.files.size() == 1 && file_name(files.files.front()) == dcp_metadata_name) {
      DcpCheckpoint checkpoint = read_dcp(opener_, join_path(root_, files.files.front()));
      checkpoint.header.shard.relative_path = files.files.front();
      headers_.push_back(std::move(checkpoint.header));
      assemblies_.push_back(std::move(checkpoint.assembly));
    } else {
      if (files.numbered_set) require_all_parts(files.files);
      if (files.files.size() == 1) {
        read_one(files.files.front());
      } else {
        read_files(files.files);
        order_splits();
      }
      if (!files.numbered_set) warn_about_gaps(root_, file_names(), findings_);
    }
    return finish();
  }

 private:
  [[nodiscard]] std::shared_ptr<ByteSource> open_file(const std::string& relative) const {
    const std::string path = join_path(root_, relative);
    return opener_.open(path, parent_path(path));
  }

  FileHeader read_file(const std::string& relative, std::shared_ptr<ByteSource> source = nullptr) {
    if (source == nullptr) source = open_file(relative);
    FileHeader header = read_header(*source, gguf_rank_max_);
    header.shard.relative_path = relative;
    note_reads(*source, header.shard);
    require_no_dcp_part(header);
    return header;
  }

  // Calls `open` for each number below `count`, as for_each_file() does, but goes on after a
  // malformed file. Returns the errors of these files in their order.
  std::vector<Error> open_each(std::size_t count, unsigned at_once,
                               const std::function<void(std::size_t)>& open) {
    std::mutex mutex;
    std::map<std::size_t, Error> errors;  // guarded by mutex
    for_each_file(opener_.storage, count, at_once, [&](std::size_t i) {
      try {
        open(i);
      } catch (const Error& error) {
        // A header may declare any number of parts, so the first missing part ends the search.
        if (exit_status(error.code()) != invalid_file || error.code() == "gg.split") throw;
        const std::lock_guard lock(mutex);
        errors.emplace(i, error);
      }
    });
    std::vector<Error> ordered;
    for (const auto& [i, error] : errors) ordered.push_back(error);
    return ordered;
  }

  // The first file determines how many of the others are read concurrently.
  void read_files(const std::vector<std::string>& files) {
    headers_.resize(files.size());
    const auto first = open_file(files.front());
    auto errors = open_each(files.size(), first->reads_at_once(), [&](std::size_t i) {
      headers_[i] = read_file(files[i], i == 0 ? first : nullptr);
    });
    throw_first(std::move(errors), files.size());
  }

  [[nodiscard]] std::vector<std::string> file_names() const {
    std::vector<std::string> names;
    for (const FileHeader& header : headers_) names.push_back(header.shard.relative_path);
    return names;
  }

  // ---- with an index

  void read_index(CheckpointFiles files) {
    const std::string index_path = join_path(root_, *files.index);
    const auto source = opener_.open(index_path, root_);
    const ShardedIndex index = read_sharded_index(*source);
    const std::vector<std::string> shards = shard_names(index);
    report_ignored(std::move(files), shards, findings_);
    std::vector<std::optional<FileHeader>> headers(shards.size());
    std::vector<char> is_missing(shards.size());  // one byte each, because threads write them
    std::vector<Error> errors =
        open_each(shards.size(), source->reads_at_once(), [&](std::size_t i) {
          headers[i] = read_shard(index_path, shards[i]);
          is_missing[i] = headers[i] ? 0 : 1;
        });
    std::vector<std::string> missing;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      if (headers[i]) headers_.push_back(*std::move(headers[i]));
      if (is_missing[i] != 0) missing.push_back(shards[i]);
    }
    if (!missing.empty()) {
      const bool is_one = missing.size() == 1;
      const Where where = {
          .path = index_path,
          .field = "weight_map",
          .expected = is_one ? "the shard next to the index" : "the shards next to the index"};
      errors.insert(errors.begin(),
                    missing_files(where, missing,
                                  is_one ? "a shard that the index lists is missing"
                                         : "shards that the index lists are missing"));
    }
    throw_first(std::move(errors), shards.size());
    warn_about_gaps(index_path + ": weight_map", shards, findings_);
    merge();
    check_index(index_path, index, shards_, tensors_, findings_);
  }

  // Returns nullopt if the file does not exist.
  std::optional<FileHeader> read_shard(const std::string& index_path, const std::string& shard) {
    std::shared_ptr<ByteSource> source;
    try {
      source = opener_.open(join_path(root_, shard), root_);
    } catch (const Error& error) {
      if (error.code() == "io.not_found") return std::nullopt;
      rethrow_as_shard(error, index_path, true);
    }
    try {
      FileHeader header = is_torch_name(shard) ? read_torch(*source) : read_safetensors(*source);
      header.shard.relative_path = shard;
      note_reads(*source, header.shard);
      require_no_dcp_part(header);
      return header;
    } catch (const Error& error) {
      rethrow_as_shard(error, index_path, false);
    }
  }

  // ---- without an index

  void require_all_parts(const std::vector<std::string>& files) const {
    const std::vector<std::string> missing = missing_parts(files);
    if (missing.empty()) return;
    throw missing_files({.path = root_, .field = "shard", .expected = "all parts"}, missing,
                        missing.size() == 1 ? "a part of the checkpoint is missing"
                                            : "parts of the checkpoint are missing");
  }

  void read_one(const std::string& file) {
    FileHeader header = read_file(file);
    const auto split = header.shard.format == FileFormat::gguf ? gguf_split(header) : std::nullopt;
    if (!split || split->count == 1) {
      headers_.push_back(std::move(header));
      order_splits();
      return;
    }
    constexpr std::string_view extension = ".gguf";
    const auto part =
        file.ends_with(extension)
            ? parse_part_name(std::string_view(file).substr(0, file.size() - extension.size()))
            : std::nullopt;
    if (!part)
      refuse_split(header,
                   "the file is a part of a split checkpoint, but its name has no part number",
                   "'" + file + "'", "NAME-00001-of-00003.gguf");
    if (part->count != split->count) {
      refuse_split(header, "the file's name and split.count contradict each other",
                   std::to_string(split->count), std::to_string(part->count));
    }
    read_parts(std::move(header), *part);
    order_splits();
  }

  void read_parts(FileHeader header, const PartName& part) {
    std::mutex mutex;
    // A file may declare any number of parts, so memory is allocated only for existing parts.
    std::map<std::size_t, FileHeader> parts;  // guarded by mutex
    const auto open = [&](std::size_t i) {
      if (i + 1 == part.number) return;
      FileHeader read = read_part(fmt::format("{}-{:0{}}-of-{:0{}}.gguf", part.stem, i + 1,
                                              part.digits, part.count, part.digits));
      const std::lock_guard lock(mutex);
      parts.emplace(i, std::move(read));
    };
    throw_first(open_each(part.count, header.shard.reads_at_once, open), part.count);
    parts.emplace(part.number - 1, std::move(header));
    for (auto& [i, each] : parts) headers_.push_back(std::move(each));
  }

  FileHeader read_part(const std::string& file) {
    try {
      return read_file(file);
    } catch (const Error& error) {
      if (error.code() != "io.not_found") throw;
      throw Error("gg.split", "this part of the split checkpoint is missing",
                  {.path = join_path(root_, file),
                   .field = "split.count",
                   .found = no_files_text({file}),
                   .expected = "all parts in one folder"});
    }
  }

  [[noreturn]] static void refuse_split(const FileHeader& header, std::string message,
                                        std::string found, std::string expected,
                                        std::string field = "split.count") {
    refuse(header.shard.path,
           {"gg.split", std::move(message), field, std::move(found), std::move(expected)});
  }

  // Sorts the parts of a GGUF split. Each part declares its number and the count of parts, which
  // must be the same in all parts.
  void order_splits() {
    std::vector<std::pair<std::uint64_t, FileHeader>> parts;
    std::optional<GgufSplit> first;
    std::uint64_t tensors = 0;
    std::set<std::uint64_t> numbers;
    for (FileHeader& header : headers_) {
      const auto split =
          header.shard.format == FileFormat::gguf ? gguf_split(header) : std::nullopt;
      if (!split) {
        if (first)
          refuse_split(header, "the file is not a part of the split checkpoint", "no split.count",
                       std::to_string(first->count));
        continue;
      }
      if (!first && &header != &headers_.front()) {
        refuse_split(header, "the list contains a part of a split checkpoint and other files",
                     std::to_string(split->count), "no split.count");
      }
      if (!first) first = split;
      tensors += header.tensors.size();
      check_part(header, *split, *first, numbers);
      parts.emplace_back(split->number, std::move(header));
    }
    if (!first) return;
    if (first->tensors && *first->tensors != tensors) {
      refuse_split(parts.front().second,
                   "the parts contain a different number of tensors than declared",
                   std::to_string(tensors), std::to_string(*first->tensors), "split.tensors.count");
    }
    std::ranges::sort(parts, {}, [](const auto& part) { return part.first; });
    headers_.clear();
    for (auto& [number, header] : parts) headers_.push_back(std::move(header));
    drop_metadata_of_later_parts();
  }

  void drop_metadata_of_later_parts() {
    const FileHeader& first = headers_.front();
    std::set<std::string> lost;
    for (auto later = headers_.begin() + 1; later != headers_.end(); ++later) {
      for (std::string& key : drop_later_metadata(first.metadata, later->metadata)) {
        lost.insert(std::move(key));
      }
    }
    if (lost.empty()) return;
    const std::vector<std::string> keys(lost.begin(), lost.end());
    findings_.push_back({.severity = Severity::warning,
                         .code = "gg.split",
                         .message = fmt::format(
                             "{}: later parts of the split checkpoint have metadata keys that the "
                             "first part lacks, or has with another value. loadstone ignores these "
                             "keys of the later parts: {}",
                             printable(first.shard.path, 400), name_list(keys))});
  }

  void check_part(const FileHeader& header, const GgufSplit& split, const GgufSplit& first,
                  std::set<std::uint64_t>& numbers) const {
    const std::vector<std::string> missing = missing_parts(file_names());
    if (!missing.empty() && split.count > headers_.size()) {
      throw Error("gg.split",
                  missing.size() == 1 ? "this part of the split checkpoint is missing"
                                      : "parts of the split checkpoint are missing",
                  {.path = join_path(root_, missing.front()),
                   .field = "split.count",
                   .found = no_files_text(missing),
                   .expected = "all parts"});
    }
    if (split.count != first.count || split.count != headers_.size()) {
      refuse_split(header, "the number of parts differs from the number in the metadata",
                   std::to_string(headers_.size()), std::to_string(split.count));
    }
    if (split.tensors != first.tensors) {
      refuse_split(header, "the parts contradict each other",
                   split.tensors ? std::to_string(*split.tensors) : "nothing",
                   first.tensors ? std::to_string(*first.tensors) : "nothing",
                   "split.tensors.count");
    }
    const auto part = named_part(header);
    const bool as_named = !part || part->number == split.number + 1;
    if (split.number >= split.count || !as_named || !numbers.insert(split.number).second) {
      refuse_split(header, "the part has the wrong number", std::to_string(split.number),
                   as_named ? "each number from 0 once" : std::to_string(part->number - 1),
                   "split.no");
    }
  }

  static std::optional<PartName> named_part(const FileHeader& header) {
    const std::string& path = header.shard.relative_path;
    return parse_part_name(std::string_view(path).substr(0, path.rfind('.')));
  }

  // ---- the catalog

  void merge() {
    std::vector<std::string> others;  // files whose values for `keys` differ
    std::set<std::string> keys;
    for (FileHeader& header : headers_) {
      const auto shard = static_cast<std::uint32_t>(shards_.size());
      shards_.push_back(std::move(header.shard));
      for (TensorInfo& tensor : header.tensors) tensor.shard = shard;
      if (tensors_.empty()) {
        tensors_ = std::move(header.tensors);
      } else {
        std::ranges::move(header.tensors, std::back_inserter(tensors_));
      }
      std::ranges::move(header.findings, std::back_inserter(findings_));
      const auto lost = join_metadata(metadata_, std::move(header.metadata), shards_.back().path);
      if (!lost.empty()) others.push_back(shards_.back().relative_path);
      keys.insert(lost.begin(), lost.end());
    }
    if (!others.empty()) report_metadata(others, {keys.begin(), keys.end()});
    headers_.clear();
  }

  // Adds a single finding, because a set may have hundreds of files.
  void report_metadata(const std::vector<std::string>& paths,
                       const std::vector<std::string>& keys) {
    findings_.push_back(
        {.severity = Severity::warning,
         .code = "ix.metadata",
         .message = fmt::format("the files have different values for metadata {}: loadstone uses "
                                "the first value, not that of {}",
                                name_list(keys), name_list(paths, paths.size(), 3))});
  }

  std::shared_ptr<const Catalog> finish() {
    merge();
    restore_gguf_shapes(metadata_, shards_, tensors_);
    QuantizationClaim claim;
    if (std::ranges::any_of(tensors_, needs_claim)) {
      claim = quantization_claim(opener_, root_, &findings_);
    }
    return std::make_shared<const Catalog>(
        std::move(root_), std::move(shards_), std::move(tensors_), std::move(metadata_),
        std::move(findings_), &opener_.storage, claim, std::move(assemblies_));
  }

  FileOpener opener_;
  std::uint32_t gguf_rank_max_;
  std::string root_;
  std::vector<FileHeader> headers_;
  std::vector<Shard> shards_;
  std::vector<std::shared_ptr<const Assembly>> assemblies_;  // empty, or one per shard
  std::vector<TensorInfo> tensors_;
  Metadata metadata_;
  std::vector<Finding> findings_;
};

// Finds the index that names exactly these files, because libraries may pass all shards of an
// index.
std::optional<CheckpointFiles> indexed(Storage& storage, const OpenOptions& options,
                                       const CheckpointFiles& files) {
  const std::set<std::string> names(files.files.begin(), files.files.end());
  for (const std::string_view name : usual_indexes) {
    try {
      const FileOpener opener{storage, options.allow_links};
      const auto source = opener.open(join_path(files.root, std::string(name)), files.root);
      const auto shards = shard_names(read_sharded_index(*source));
      if (std::set<std::string>(shards.begin(), shards.end()) != names) continue;
      CheckpointFiles found;
      found.root = files.root;
      found.index = name;
      return found;
    } catch (const Error& error) {
      if (error.code() != "io.not_found") throw;
    }
  }
  return std::nullopt;
}

Storage& storage_of(const OpenOptions& options) {
  return options.storage == nullptr ? local_storage() : *options.storage;
}

}  // namespace

std::shared_ptr<const Catalog> open_checkpoint(const std::string& path,
                                               const OpenOptions& options) {
  return only_errors([&] {
    Storage& storage = storage_of(options);
    return CheckpointReader(storage, options).read(locate_checkpoint(storage, path));
  });
}

std::shared_ptr<const Catalog> open_checkpoint(const std::vector<std::string>& paths,
                                               const OpenOptions& options) {
  return only_errors([&]() -> std::shared_ptr<const Catalog> {
    if (paths.empty()) throw Error("format.no_checkpoint", "the list of files is empty");
    if (paths.size() == 1) return open_checkpoint(paths.front(), options);
    Storage& storage = storage_of(options);
    const CheckpointFiles files = as_checkpoint_files(storage, paths);
    try {
      return CheckpointReader(storage, options).read(files);
    } catch (const Error& error) {
      if (error.code() != "ix.duplicate") throw;
      auto found = indexed(storage, options, files);
      if (!found) throw;
      return CheckpointReader(storage, options).read(*std::move(found));
    }
  });
}

}  // namespace loadstone
