// What a checkpoint holds: names, encodings, shapes and byte ranges, from headers alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "loadstone/defaults.h"
#include "loadstone/dtype.h"
#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/name_hash.h"
#include "loadstone/quantized_tensor.h"
#include "loadstone/shape.h"
#include "loadstone/storage.h"
#include "loadstone/tensor_info.h"

namespace loadstone {

class QuantizedTensors;
struct Assembly;

enum class FileFormat : std::uint8_t { safetensors, gguf, torch, dcp };

// "safetensors", "gguf", "torch", "dcp"
[[nodiscard]] LOADSTONE_API std::string_view name(FileFormat format) noexcept;

struct Shard {
  std::string path;           // as opened
  std::string relative_path;  // to the checkpoint's root; what a saved plan holds
  FileFormat format = FileFormat::safetensors;
  FileIdentity identity;
  std::string header_digest;     // XXH3-128 of all bytes around the data, 32 hex digits
  std::uint64_t data_begin = 0;  // offset of the first data byte
  // Where the data end and a directory follows, as in zip archives; 0: nothing follows.
  std::uint64_t tail_begin = 0;
  unsigned reads_at_once = 0;  // see ByteSource
  bool is_on_network = false;  // see ByteSource
};

// The 13 types of GGUF metadata, by their ids in the file.
enum class MetadataType : std::uint8_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64,
};

// "u8", "bool", "string" ...
[[nodiscard]] LOADSTONE_API std::string_view name(MetadataType type) noexcept;

struct MetadataValue;

// The items of an array as they stand in the file, made into values when asked for: a vocabulary of
// 250,000 tokens stays as small as its bytes. Thread-safe while nobody adds to it.
class LOADSTONE_API MetadataArray {
 public:
  explicit MetadataArray(MetadataType item_type) : item_type_(item_type) {}

  [[nodiscard]] MetadataType item_type() const noexcept { return item_type_; }
  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  // `index` is less than size().
  [[nodiscard]] MetadataValue operator[](std::size_t index) const;

  // Numbers and bools, little-endian, as many bytes as their count says.
  void assign_numbers(std::vector<std::byte> bytes) { bytes_ = std::move(bytes); }
  void add_string(std::string_view text);
  void add_array(MetadataArray array) { arrays_.push_back(std::move(array)); }

  class Iterator {
   public:
    using difference_type = std::ptrdiff_t;
    using value_type = MetadataValue;

    Iterator() = default;
    Iterator(const MetadataArray* array, std::size_t index) : array_(array), index_(index) {}
    MetadataValue operator*() const;
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    Iterator operator++(int) { return {array_, index_++}; }
    friend bool operator==(const Iterator&, const Iterator&) = default;

   private:
    const MetadataArray* array_ = nullptr;
    std::size_t index_ = 0;
  };
  [[nodiscard]] Iterator begin() const { return {this, 0}; }
  [[nodiscard]] Iterator end() const { return {this, size()}; }

 private:
  MetadataType item_type_;
  std::vector<std::byte> bytes_;            // numbers, or the strings' text without a gap
  std::vector<std::uint64_t> string_ends_;  // offsets into bytes_
  std::vector<MetadataArray> arrays_;
};

// A value of GGUF metadata, or of the strings of safetensors' __metadata__. Integers are held as
// the 64 bits of their sign, floats as double, whatever width `type` says they have in the file.
struct MetadataValue {
  std::variant<std::string, bool, std::int64_t, std::uint64_t, double, MetadataArray> value;
  MetadataType type = MetadataType::string;
};

// Values by key.
using Metadata = std::map<std::string, MetadataValue>;

// Metadata as people and programs write it, docs/formats/gguf.md: {"format":
// "loadstone-gguf-metadata", "version": 1, "entries": [{"key", "type", "value"} ...]}. Trusts
// nothing: Error "convert.metadata_json" for what is no such JSON, for keys that GGUF does not have
// and values that do not fit their type.
[[nodiscard]] LOADSTONE_API Metadata metadata_from_json(std::string_view text);

// "string", "u32", "array of f32" ...
[[nodiscard]] LOADSTONE_API std::string type_name(const MetadataValue& value);

// Immutable once made, so thread-safe; shared by plans, which keep it alive.
class LOADSTONE_API Catalog {
 public:
  // Indices into tensors(): [begin, end).
  struct Range {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };

  // Checks names for duplicates across shards (Error "ix.duplicate"). Tensors come in file order:
  // by shard, then by offset.
  // `storage`: what the shards are read through; it must live as long. Null: the machine's own.
  // `assemblies`: one for each shard, or none; see assembly().
  Catalog(std::string root, std::vector<Shard> shards, std::vector<TensorInfo> tensors,
          Metadata metadata, std::vector<Finding> findings, Storage* storage = nullptr,
          QuantizationClaim claim = {},
          std::vector<std::shared_ptr<const Assembly>> assemblies = {});
  // Several checkpoints in one plan: a base and adapters, models that are merged. Shards and
  // tensors follow one another; names are looked up in each checkpoint by itself, and root,
  // metadata and claim are those of the first. Throws Error "plan.options" where there are none,
  // one is joined already, or they are read through different storages.
  explicit Catalog(std::vector<std::shared_ptr<const Catalog>> checkpoints);
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  [[nodiscard]] const std::string& root() const noexcept { return root_; }
  // The path that people know it by: of its one file, or of the folder.
  [[nodiscard]] const std::string& shown_path() const noexcept {
    return shards_.size() == 1 ? shards_[0].path : root_;
  }
  [[nodiscard]] const std::vector<Shard>& shards() const noexcept { return shards_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }
  // Warnings met while opening; never errors (those are thrown). all_findings() has more.
  [[nodiscard]] const std::vector<Finding>& findings() const noexcept { return findings_; }
  // `other`, or where that is null the storage that the checkpoint was opened through.
  [[nodiscard]] Storage& storage(Storage* other = nullptr) const noexcept;
  // Where a shard's tensors lie in pieces in several files, as torch.distributed.checkpoint saves
  // them: the shard's file is followed by their data, and offsets beyond its end are those of data
  // that are read from the pieces. Null: the shard is one file.
  [[nodiscard]] const std::shared_ptr<const Assembly>& assembly(std::uint32_t shard) const noexcept;
  // Index into tensors(); none where no tensor of the checkpoint has the name.
  [[nodiscard]] std::optional<std::uint32_t> find(std::string_view name,
                                                  std::uint32_t checkpoint = 0) const;
  // Those that were joined; none: the catalog is of one checkpoint.
  [[nodiscard]] const std::vector<std::shared_ptr<const Catalog>>& checkpoints() const noexcept {
    return checkpoints_;
  }
  // The tensors of one of them. Names that rules and models use are those of the first.
  [[nodiscard]] Range tensors_of(std::uint32_t checkpoint) const;
  // Where a claim is made, FP8 tensors without scales have lost them. Only looked for where there
  // are FP8 tensors; none elsewhere.
  [[nodiscard]] const QuantizationClaim& quantization_claim() const noexcept { return claim_; }
  // Which tensors are the components of quantized ones; found when it is asked for first, which may
  // read, see find_quantized_tensors(). Lives as long as the catalog. Throws Error "io.*".
  [[nodiscard]] const QuantizedTensors& quantized() const;
  // True once the shard's header was compared with its digest for this catalog. Once is
  // enough: each time a shard is opened, its identity is compared. Thread-safe.
  [[nodiscard]] std::atomic<bool>& header_checked(std::uint32_t shard) const noexcept {
    return headers_checked_[shard];
  }
  // Sum of the tensors' bytes.
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }

 private:
  std::string root_;
  std::vector<Shard> shards_;
  std::vector<TensorInfo> tensors_;
  Metadata metadata_;
  std::vector<Finding> findings_;
  Storage* storage_;              // not owned; null: the machine's own
  NameMap<std::uint32_t> index_;  // views into tensors_; empty where checkpoints are joined
  std::vector<std::shared_ptr<const Catalog>> checkpoints_;
  std::uint64_t total_bytes_ = 0;
  QuantizationClaim claim_;
  mutable std::once_flag quantized_once_;
  mutable std::unique_ptr<const QuantizedTensors> quantized_;
  std::vector<std::shared_ptr<const Assembly>> assemblies_;  // as many as shards
  mutable std::vector<std::atomic<bool>> headers_checked_;   // as many as shards
};

struct OpenOptions {
  // Follow links that leave the checkpoint's folder (default: only into the blobs/ of a hub cache).
  bool allow_links = false;
  std::uint32_t gguf_rank_max = defaults::gguf_rank_max;  // dims of a GGUF tensor, at most
  // Where to read from, now and whenever the catalog is used, so it must live as long; null means
  // the machine's own file system.
  Storage* storage = nullptr;
};

// Opens a file, a folder (with or without an index), an index file, a glob pattern, or one part of
// a split GGUF (then all parts). Reads headers only. Throws Error for anything that breaks a rule
// of the format. Which files of a folder are taken: docs/formats/sharded-index.md.
[[nodiscard]] LOADSTONE_API std::shared_ptr<const Catalog> open_checkpoint(
    const std::string& path, const OpenOptions& options = {});
// Several files that together are one checkpoint; Error "format.no_checkpoint" where there are
// none.
[[nodiscard]] LOADSTONE_API std::shared_ptr<const Catalog> open_checkpoint(
    const std::vector<std::string>& paths, const OpenOptions& options = {});

// The catalog as the JSON that `loadstone inspect --json` prints.
[[nodiscard]] LOADSTONE_API std::string to_json(const Catalog& catalog);

// The same for people: shards, metadata, totals per encoding, findings; with a row a tensor on
// request.
[[nodiscard]] LOADSTONE_API std::string to_table(const Catalog& catalog, bool with_tensors);

// Returns the findings about the files, and the errors that headers alone show, sorted: quantized
// tensors that cannot be read, experts that are not whole. They are in the two above.
[[nodiscard]] LOADSTONE_API std::vector<Finding> all_findings(const Catalog& catalog);

}  // namespace loadstone
