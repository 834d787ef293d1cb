// The contents of a checkpoint: names, encodings, shapes and byte ranges, read from headers alone.
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

// Returns "safetensors", "gguf", "torch" or "dcp".
[[nodiscard]] LOADSTONE_API std::string_view name(FileFormat format) noexcept;

struct Shard {
  std::string path;           // as opened
  std::string relative_path;  // relative to the checkpoint's root; stored in saved plans
  FileFormat format = FileFormat::safetensors;
  FileIdentity identity;
  std::string header_digest;     // XXH3-128 of all bytes around the data, 32 hex digits
  std::uint64_t data_begin = 0;  // offset of the first data byte
  // Offset of the end of the data if more bytes follow it, such as a zip archive's directory;
  // 0: the data extends to the end of the file.
  std::uint64_t tail_begin = 0;
  unsigned reads_at_once = 0;  // see ByteSource::reads_at_once()
  bool is_on_network = false;  // see ByteSource::is_on_network()
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

// Returns "u8", "bool", "string" ...
[[nodiscard]] LOADSTONE_API std::string_view name(MetadataType type) noexcept;

struct MetadataValue;

// A GGUF metadata array. Keeps its items in the file's encoding and decodes them on access, so that
// a vocabulary of 250,000 tokens takes no more memory than in the file. Thread-safe while no thread
// adds items.
class LOADSTONE_API MetadataArray {
 public:
  explicit MetadataArray(MetadataType item_type) : item_type_(item_type) {}

  [[nodiscard]] MetadataType item_type() const noexcept { return item_type_; }
  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  // Precondition: `index` < size().
  [[nodiscard]] MetadataValue operator[](std::size_t index) const;

  // Sets the items of an array of numbers or bools from their little-endian bytes, whose length
  // determines the number of items.
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
  std::vector<std::byte> bytes_;            // the numbers, or the concatenated strings
  std::vector<std::uint64_t> string_ends_;  // the end of each string, as an offset into bytes_
  std::vector<MetadataArray> arrays_;
};

// A value of GGUF metadata, or a string of safetensors' __metadata__. Integers are widened to 64
// bits and floats to double; `type` keeps their type in the file.
struct MetadataValue {
  std::variant<std::string, bool, std::int64_t, std::uint64_t, double, MetadataArray> value;
  MetadataType type = MetadataType::string;
};

// Metadata values by key.
using Metadata = std::map<std::string, MetadataValue>;

// Parses metadata that people and programs write as JSON, see docs/formats/gguf.md: values by key,
// {"general.architecture": "wan", "wan.block_count": 40}, or
// {"format": "loadstone-gguf-metadata", "version": 1, "entries": [{"key", "type", "value"} ...]}.
// A value without a type gets the type of its key in GGUF or, for other keys, the type of the
// value. Checks everything: throws Error "convert.metadata_json" if the JSON is malformed, if GGUF
// does not allow a key, or if a value does not fit its type or has none.
[[nodiscard]] LOADSTONE_API Metadata metadata_from_json(std::string_view text);

// Returns "string", "u32", "array of f32" ...
[[nodiscard]] LOADSTONE_API std::string type_name(const MetadataValue& value);

// The contents of a checkpoint. Immutable after construction, so thread-safe. Plans share the
// catalog and keep it alive.
class LOADSTONE_API Catalog {
 public:
  // A range [begin, end) of indices into tensors().
  struct Range {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };

  // Throws Error "ix.duplicate" if two tensors, even in different shards, have the same name.
  // `tensors` must be in file order: by shard, then by offset.
  // `storage` reads the shards and must outlive the catalog; null: this machine's file system.
  // `assemblies` has one element per shard, or is empty; see assembly().
  Catalog(std::string root, std::vector<Shard> shards, std::vector<TensorInfo> tensors,
          Metadata metadata, std::vector<Finding> findings, Storage* storage = nullptr,
          QuantizationClaim claim = {},
          std::vector<std::shared_ptr<const Assembly>> assemblies = {});
  // Joins several checkpoints for one plan: a base and adapters, or models to merge. Concatenates
  // their shards and tensors; find() searches one checkpoint at a time. Root, metadata and
  // quantization claim are those of the first checkpoint. Throws Error "plan.options" if
  // `checkpoints` is empty, if one is already joined, or if they have different storages.
  explicit Catalog(std::vector<std::shared_ptr<const Catalog>> checkpoints);
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  [[nodiscard]] const std::string& root() const noexcept { return root_; }
  // Returns the path to show to users: the only file, or the folder.
  [[nodiscard]] const std::string& shown_path() const noexcept {
    return shards_.size() == 1 ? shards_[0].path : root_;
  }
  [[nodiscard]] const std::vector<Shard>& shards() const noexcept { return shards_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }
  // Returns the warnings from opening the files (errors are thrown). all_findings() has more.
  [[nodiscard]] const std::vector<Finding>& findings() const noexcept { return findings_; }
  // Returns `*other`, or the storage that the checkpoint was opened with if `other` is null.
  [[nodiscard]] Storage& storage(Storage* other = nullptr) const noexcept;
  // Returns the pieces of a shard whose tensors torch.distributed.checkpoint spread over several
  // files; null: the shard is one file. Offsets beyond the end of the shard's own file address data
  // that loadstone reads from the pieces.
  [[nodiscard]] const std::shared_ptr<const Assembly>& assembly(std::uint32_t shard) const noexcept;
  // Returns an index into tensors(), or nullopt if no tensor of the checkpoint has the name.
  [[nodiscard]] std::optional<std::uint32_t> find(std::string_view name,
                                                  std::uint32_t checkpoint = 0) const;
  // Returns the joined checkpoints; empty if this catalog describes one checkpoint.
  [[nodiscard]] const std::vector<std::shared_ptr<const Catalog>>& checkpoints() const noexcept {
    return checkpoints_;
  }
  // Returns the tensors of one checkpoint. Rules and models refer to the names of the first
  // checkpoint.
  [[nodiscard]] Range tensors_of(std::uint32_t checkpoint) const;
  // Returns the quantization that the configs declare. loadstone reads the configs only if the
  // checkpoint has tensors that do not describe themselves (FP8, GPTQ, AWQ, transforms); otherwise
  // the result is empty.
  [[nodiscard]] const QuantizationClaim& quantization_claim() const noexcept { return claim_; }
  // Returns the quantized tensors with their components. The first call computes them, which may
  // read from the shards, see find_quantized_tensors(). The result lives as long as the catalog.
  // Throws Error "io.*".
  [[nodiscard]] const QuantizedTensors& quantized() const;
  // Returns a flag that becomes true when loadstone has compared the shard's header with its
  // digest; later opens then compare only the file's identity. Thread-safe.
  [[nodiscard]] std::atomic<bool>& header_checked(std::uint32_t shard) const noexcept {
    return headers_checked_[shard];
  }
  // Returns the total size of all tensors.
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }

 private:
  std::string root_;
  std::vector<Shard> shards_;
  std::vector<TensorInfo> tensors_;
  Metadata metadata_;
  std::vector<Finding> findings_;
  Storage* storage_;              // not owned; null: this machine's file system
  NameMap<std::uint32_t> index_;  // views into tensors_; empty if checkpoints are joined
  std::vector<std::shared_ptr<const Catalog>> checkpoints_;
  std::uint64_t total_bytes_ = 0;
  QuantizationClaim claim_;
  mutable std::once_flag quantized_once_;
  mutable std::unique_ptr<const QuantizedTensors> quantized_;
  std::vector<std::shared_ptr<const Assembly>> assemblies_;  // one per shard
  mutable std::vector<std::atomic<bool>> headers_checked_;   // one per shard
};

struct OpenOptions {
  // Follow links out of the checkpoint's folder. By default loadstone follows only links into the
  // blobs/ folder of a Hugging Face cache.
  bool allow_links = false;
  std::uint32_t gguf_rank_max = defaults::gguf_rank_max;  // most dims of a GGUF tensor
  // Reads all files, also when the catalog is used later, so it must outlive the catalog. Null:
  // this machine's file system.
  Storage* storage = nullptr;
};

// Opens a file, a folder (with or without an index), an index file, a glob pattern, or one part of
// a split GGUF (which opens all parts). Reads headers only. Throws Error for any violation of the
// format. docs/formats/sharded-index.md specifies which files of a folder loadstone opens.
[[nodiscard]] LOADSTONE_API std::shared_ptr<const Catalog> open_checkpoint(
    const std::string& path, const OpenOptions& options = {});
// Opens several files as one checkpoint. Throws Error "format.no_checkpoint" if `paths` is empty.
[[nodiscard]] LOADSTONE_API std::shared_ptr<const Catalog> open_checkpoint(
    const std::vector<std::string>& paths, const OpenOptions& options = {});

// Returns the catalog as the JSON that `loadstone inspect --json` prints.
[[nodiscard]] LOADSTONE_API std::string to_json(const Catalog& catalog);

// Returns the catalog as text: shards, metadata, totals per encoding, findings and, if
// `with_tensors`, one row per tensor.
[[nodiscard]] LOADSTONE_API std::string to_table(const Catalog& catalog, bool with_tensors);

// Returns, sorted, the findings about the files and the errors that headers reveal (quantized
// tensors that cannot be read, incomplete experts). to_json() and to_table() include them.
[[nodiscard]] LOADSTONE_API std::vector<Finding> all_findings(const Catalog& catalog);

}  // namespace loadstone
