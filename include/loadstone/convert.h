// Converts one checkpoint into another, file to file, with memory that does not depend on the size
// of tensors and files.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loadstone/budget.h"
#include "loadstone/catalog.h"
#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/importance.h"
#include "loadstone/merge_options.h"
#include "loadstone/observer.h"
#include "loadstone/plan.h"
#include "loadstone/quantization.h"
#include "loadstone/receipt.h"
#include "loadstone/recipe.h"
#include "loadstone/storage.h"

namespace loadstone {

// Layout of experts: one tensor per expert ("mlp.experts.3.up_proj.weight"), or all experts of a
// layer in one ("mlp.experts.gate_up_proj" [experts, 2 * inner, hidden], "mlp.experts.down_proj").
enum class ExpertLayout : std::uint8_t { keep, fused, separate };

// "keep", "fused", "separate"
[[nodiscard]] LOADSTONE_API std::string_view name(ExpertLayout layout) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<ExpertLayout> expert_layout(
    std::string_view name) noexcept;

// Names, shapes and configs of the components of quantized tensors. `unified` is ModelOpt's export
// format; `gguf` stores blocks under the tensors' own names. bitsandbytes' encodings have one
// layout only, their own.
enum class QuantizeStyle : std::uint8_t { unified, compressed_tensors, gguf };

// "modelopt", "compressed-tensors", "gguf"
[[nodiscard]] LOADSTONE_API std::string_view name(QuantizeStyle style) noexcept;

// Format for tensors whose name matches `pattern`.
struct QuantizeFormat {
  std::string pattern{};  // RE2 syntax, anywhere in the name; empty: every chosen tensor
  // Encoding "none" leaves tensors unchanged. For GGUF files it may be a plain type or, without a
  // pattern, a mix, which assigns types by llama.cpp's rules.
  Quantization quantization{};
};

// Bytes to write: those of the encoding's first dialect, or exactly those that ModelOpt writes.
enum class QuantizeMode : std::uint8_t { exact, compat };

// "exact", "modelopt-compat"
[[nodiscard]] LOADSTONE_API std::string_view name(QuantizeMode mode) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<QuantizeMode> quantize_mode(
    std::string_view name) noexcept;

// Parses an encoding: "nf4", "NVFP4", "nf4:128" with a block size, "none"; for GGUF files also
// mixes ("q4_k_m") and plain types ("bf16"). Throws Error "plan.options".
[[nodiscard]] LOADSTONE_API Quantization
parse_quantization(std::string_view text, QuantizeMode mode = QuantizeMode::exact,
                   FileFormat format = FileFormat::safetensors);

// Tensors to quantize: weights of linear layers inside decoder layers, without those that servers
// expect unquantized (see src/convert/choose/quantize_rules.cpp), plus `include`, minus `exclude`.
struct QuantizeOptions {
  // The first match wins, and the one without a pattern is last; empty: nothing is quantized.
  std::vector<QuantizeFormat> formats;
  std::vector<std::string> include;  // RE2 syntax, anywhere in the name
  std::vector<std::string> exclude;
  // bitsandbytes' encodings have one style and allow none here; for others nullopt means `unified`.
  // A style without formats re-packs quantized tensors; no value changes.
  std::optional<QuantizeStyle> style;
  // Non-finite values become findings instead of Error "q.nan", and so do finite values that
  // overflow their new dtype, quantized or not, instead of Error "convert.overflow".
  bool allow_non_finite = false;
  // For GGUF files: importance by tensor name. Null: values alone decide, and loadstone rejects the
  // encodings with the fewest bits.
  std::shared_ptr<const ImportanceMatrix> importance{};
};

// A small file next to the model: a config, a tokenizer.
struct ExtraFile {
  std::string name{};                    // below the target's folder: "config.json", "a/b.json"
  std::string text{};                    // the contents, if copy_of is empty
  std::string copy_of{};                 // path of the regular file (not a link) to copy
  std::shared_ptr<ByteSource> source{};  // reads copy_of from another machine
};

// The other files of a checkpoint's folder.
struct ModelFolder {
  std::string config{};               // text of config.json; empty: the folder has no config
  std::vector<ExtraFile> files{};     // files to copy
  std::vector<std::string> links{};   // names of links, which are not copied
  std::vector<std::string> denied{};  // names of files that the other machine does not serve
  // Paths in modules.json or model_index.json that are not among `files`: components of a
  // pipeline, paths outside the folder, files that are too large for a companion.
  std::vector<std::string> left{};
  std::vector<std::string> code{};    // names of Python files that were not requested
  std::vector<std::string> others{};  // names of weights of other checkpoints, and of folders
};

// Lists a local folder; for any other path the result is empty. Includes all files of folders that
// modules.json names. `with_code`: Python files too. Throws Error "io.read".
[[nodiscard]] LOADSTONE_API ModelFolder read_model_folder(const std::string& path,
                                                          bool with_code = false);

// Lists the folder of a checkpoint that was opened as `path`, through the catalog's storage; a
// remote one at the catalog's revision. A web server cannot list a folder, so loadstone requests
// each known name. Python files have no known names: Error "convert.extra".
[[nodiscard]] LOADSTONE_API ModelFolder read_model_folder(const Catalog& catalog,
                                                          const std::string& path,
                                                          bool with_code = false);

// For an output of one file, which omits all other files: fills only `left` (the folders that
// modules.json or model_index.json of the local folder `path` name) and `others` (its adapters).
[[nodiscard]] LOADSTONE_API ModelFolder folders_left_out(const std::string& path);

struct ConvertOptions {
  // ---- These change the result.
  // Format to write: safetensors or GGUF.
  FileFormat format = FileFormat::safetensors;
  // Change names and layouts; tensors that no rule matches keep their names.
  Rules rules;
  // Made for this catalog. Without rules they alone determine the output; with rules, the rules
  // apply to the tensors that no recipe reads.
  Recipes recipes;
  // New dtype of floating-point tensors of 16 bits or more, of blocks, and of FP8 tensors without a
  // scale. nullopt: tensors keep their dtype. Codes always keep theirs.
  std::optional<Dtype> dtype;
  // F32, BF16 or F16: for blocks that the file cannot store, if `dtype` is not set. A GGUF file
  // keeps blocks if their rows stay whole.
  Dtype block_dtype = Dtype::bf16;
  // Decode quantized tensors, and FP8 tensors without scales, to `dtype` or else `block_dtype`.
  // `quantize` implies this for tensors that are re-encoded. Names then stay unchanged, as they do
  // when experts change their layout, so rules and recipes are not allowed.
  bool dequantize = false;
  ExpertLayout experts = ExpertLayout::keep;
  QuantizeOptions quantize;
  // Keys to add to the source's metadata or to replace in it. Typed in a GGUF file, which needs
  // "general.architecture" from one of the two; text in safetensors.
  Metadata metadata;
  // GGUF files: allow tensors of more than 4 dims and names of more than 63 bytes, which ggml
  // rejects and programs for video models read.
  bool beyond_ggml = false;
  // Merges the joined models and adapters of the catalog. Not with rules, recipes or expert
  // layouts.
  std::optional<MergeOptions> merge;
  // Other files for the target's folder; its config declares the quantization.
  ModelFolder folder;
  // Applies to sources that no recipe reads.
  UnexpectedPolicy unexpected = UnexpectedPolicy::warn;
  // One file; else a folder with one file if that is enough, or with shards and their index.
  bool one_file = true;
  // Shards next to each other under the target's name, as in llama.cpp: out.gguf becomes
  // out-00001-of-00003.gguf, or stays out.gguf if one is enough. Requires GGUF, `one_file` false
  // and `stem` (the name without the suffix).
  bool is_split = false;
  // Prefix of file names in a folder: STEM.safetensors, STEM-00001-of-00002.safetensors ... Empty:
  // the name that the config's library looks for, "diffusion_pytorch_model" for diffusers (its
  // configs have `_class_name`) and "model" for others.
  std::string stem;
  // Bytes of tensors per shard; a larger tensor has a shard to itself.
  std::uint64_t shard_bytes_max = defaults::shard_bytes_max;
  // ---- These change only the cost.
  // Bytes in flight, all threads together.
  std::uint64_t staging_bytes_max = defaults::convert_staging_bytes_max;
  // Total memory of the conversion, lists of tensors included. If it is not enough, the finding
  // "plan.over_budget" reports the minimum.
  std::optional<std::uint64_t> memory_bytes_max;
  unsigned threads = 0;  // 0: one per core, at most defaults::threads_max
};

// A tensor of an output file: a target, or one component of a quantized target.
struct OutputTensor {
  static constexpr std::uint32_t no_part = UINT32_MAX;

  std::uint32_t target = 0;      // index into Plan::targets
  std::uint32_t part = no_part;  // of quantized_parts(); no_part: the target, or a constant
  std::string name{};
  Shape shape{};
  Encoding encoding = Dtype::u8;
  Constant constant{};       // known before anything is read
  bool is_inverted = false;  // F32: the reciprocal of the component
  std::uint64_t begin = 0;   // bytes after the header
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return end - begin; }
};

struct OutputFile {
  std::string name;  // in the target's folder; empty: the target itself
  std::vector<OutputTensor> tensors;
  std::uint64_t header_bytes = 0;  // all bytes before the data
  std::uint64_t data_bytes = 0;    // includes the format's padding between tensors

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return header_bytes + data_bytes; }
};

// Similar tensors, and their new encoding.
struct QuantizeRow {
  std::string names;  // with * in place of numbers
  std::string shape;
  std::string before;    // "BF16"
  std::string after;     // "nvfp4"; the same as `before` if unchanged
  std::string reason{};  // why it is unchanged; else empty
  std::size_t tensors = 0;
  std::uint64_t bytes_before = 0;
  std::uint64_t bytes_after = 0;
};

// A tensor whose codes are kept and re-packed into another style or into GGUF's blocks.
struct RepackedTensor {
  std::string name;  // of the decoded tensor
  Shape shape;
  Quantization quantization;
  std::vector<std::string> targets{};  // its components, as targets of the plan
};

// Plain data from make_conversion(). Thread-safe while nobody writes to it.
struct Conversion {
  Plan plan;  // its targets are the output's tensors; its peak is the conversion's
  std::vector<OutputFile> files;
  std::string index_name;  // in the target's folder; empty: no index is written
  FileFormat format = FileFormat::safetensors;
  Metadata metadata;              // of every file's header; for a split GGUF of the first file's
  std::vector<ExtraFile> extras;  // of a folder; written with the index
  std::vector<QuantizeRow> quantize_rows;  // empty if nothing is quantized
  std::vector<RepackedTensor> repacked;
  bool one_file = true;
  bool is_split = false;  // several files next to each other
  std::string stem;
  // Text of the output's config.json; empty if the source has none. If a config is already at the
  // target and safetensors would not replace it, it must declare these codes, and may tie names
  // that have one tensor each only if the source does so or has no config.
  std::string config;
  bool has_codes = false;
  bool has_tie = false;
  Budget budget;
  std::uint64_t digest_bytes = 0;   // bytes that wait to be hashed, see docs/receipt.md
  std::uint64_t bytes_to_read = 0;  // each byte once; transposed tensors may be read again
  std::uint64_t bytes_to_write = 0;
  std::uint64_t peak_bytes = 0;  // in addition to the process's memory before the catalog is opened

  [[nodiscard]] bool ok() const noexcept { return plan.ok(); }
};

// Plans a conversion. Reads configs, files next to the model, small tensors (scales, alphas, quant
// states), and adapter matrices for tied names. Writes nothing. Throws Error "plan.rules" and
// "plan.options" like make_plan(), and read errors.
[[nodiscard]] LOADSTONE_API Conversion make_conversion(std::shared_ptr<const Catalog> catalog,
                                                       const ConvertOptions& options = {});

// One of `count` shares of the output's shards; different processes may write them at once.
struct ConvertPart {
  std::uint32_t index = 1;  // from 1 to count
  std::uint32_t count = 1;
};

// Returns the format by the target's name: ".safetensors" and ".gguf" are one file, other names are
// folders. Throws Error "convert.target" for a name with the suffix of a format that loadstone does
// not write, such as "x.pt"; "x.pt/" is a folder.
[[nodiscard]] LOADSTONE_API std::optional<FileFormat> format_of_target(std::string_view target);

// Use of the system's page cache for the files that are read and written. `automatic` releases
// pages if reads and writes exceed half of the machine's memory, because they would evict the pages
// of other programs. Pages of sources that were cached before are kept.
enum class PageCache : std::uint8_t { automatic, keep, release };

// "auto", "keep", "release"
[[nodiscard]] LOADSTONE_API std::string_view name(PageCache choice) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<PageCache> parse_page_cache(
    std::string_view text) noexcept;

// Scope of one call; the defaults do the whole conversion from the beginning.
struct ConvertRun {
  // Keep the shards that an earlier run of the same conversion finished, and keep this run's even
  // if it fails. A target of one file has no shards and starts again.
  bool resume = false;
  // Write only this share; its shards wait next to the target until a run with `finish`.
  std::optional<ConvertPart> part;
  // Check that all shards are there, and give them their names.
  bool finish = false;
  // Write a receipt: receipt.json in a folder, else TARGET.receipt.json. The same for all parts.
  // Shards of a folder always have XXH3-128 digests, which a resumed run reads.
  std::optional<DigestKind> receipt = {};
  PageCache page_cache = PageCache::automatic;
  Observer* observer = nullptr;  // receives progress, and can stop the run
  Storage* storage = nullptr;    // for sources and target; null: the catalog's
};

struct ConvertReport {
  std::vector<std::string> outputs;  // paths of the files, the receipt last
  std::vector<Finding> findings;
  double seconds = 0;
  double sync_seconds = 0;  // of these, flushing files to disk, by any thread
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_read_ahead = 0;      // requested from the system, not in its page cache
  std::uint64_t bytes_kept = 0;            // in files that earlier runs finished
  std::uint64_t peak_bytes = 0;            // as planned, with the actual staging
  PageCache page_cache = PageCache::keep;  // as applied: `keep` or `release`
};

// Checks that the target may be written. Throws Error "convert.target" if it is a source, is inside
// the source's folder of shards, or is a folder with a model that is not an older output of this
// name; "convert.extra" if a file for its folder cannot be copied. convert() calls it first; a dry
// run may too. Returns error "io.no_space" if the disk lacks room, and warnings about files of
// another model that stay there, which the report repeats.
LOADSTONE_API std::vector<Finding> check_target(const Conversion& conversion,
                                                const std::string& target,
                                                const ConvertRun& run = {});

// Returns the files of a share: balanced by bytes, and the same in every process.
[[nodiscard]] LOADSTONE_API std::vector<std::uint32_t> files_of_part(const Conversion& conversion,
                                                                     const ConvertPart& part);

// Writes the target: replaces a file, or fills a folder. Only complete files appear under their
// final names; until then they are in a folder .loadstone-NAME.part next to the target, where each
// complete shard has its own name. A new run that fails or is stopped leaves nothing; a killed
// process leaves that folder, which the next run takes over or removes. Throws errors among the
// findings, and for sources that have changed, before it writes anything; also "convert.locked" if
// another process does the same work, "convert.state" if the folder belongs to another conversion,
// and "convert.incomplete" if shards to finish are missing.
LOADSTONE_API ConvertReport convert(const Conversion& conversion, const std::string& target,
                                    const ConvertRun& run = {});

// Writes the data of one file, without its header, into memory: `data` has the file's data_bytes,
// and each tensor is at its begin. Padding between tensors is left as it was. Returns the bytes
// read. Files may be made in any order and by several threads; shard_bytes_max determines their
// sizes. Throws the read errors of convert(); the contents of `data` are then undefined.
LOADSTONE_API std::uint64_t convert_in_memory(const Conversion& conversion, std::uint32_t file,
                                              std::span<std::byte> data,
                                              Observer* observer = nullptr,
                                              Storage* storage = nullptr);

[[nodiscard]] LOADSTONE_API std::string to_json(const ConvertReport& report);
// Returns the conversion as JSON: {"files", "tensors", "metadata", "threads", "bytes_to_read" ...}
[[nodiscard]] LOADSTONE_API std::string to_json(const Conversion& conversion);
// Returns it as text: files, dtypes before and after, totals; on request with one row per tensor.
[[nodiscard]] LOADSTONE_API std::string to_table(const Conversion& conversion, bool with_tensors);

}  // namespace loadstone
