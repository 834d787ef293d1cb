// Converts one checkpoint into another, file to file, with memory that does not depend on the size
// of the tensors and files.
#pragma once

#include <cstdint>
#include <map>
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

// Layout of experts: one tensor per expert ("mlp.experts.3.up_proj.weight"), or one tensor for all
// experts of a layer ("mlp.experts.gate_up_proj" [experts, 2 * inner, hidden],
// "mlp.experts.down_proj").
enum class ExpertLayout : std::uint8_t { keep, fused, separate };

// Returns "keep", "fused" or "separate".
[[nodiscard]] LOADSTONE_API std::string_view name(ExpertLayout layout) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<ExpertLayout> expert_layout(
    std::string_view name) noexcept;

// Names, shapes and configs of the components of quantized tensors. `unified` is ModelOpt's export
// format; `gguf` stores blocks under the tensors' own names. The encodings of bitsandbytes have
// only the layout of bitsandbytes.
enum class QuantizeStyle : std::uint8_t { unified, compressed_tensors, gguf };

// Returns "modelopt", "compressed-tensors" or "gguf".
[[nodiscard]] LOADSTONE_API std::string_view name(QuantizeStyle style) noexcept;

// Encoding of the tensors whose names match `pattern`.
struct QuantizeFormat {
  std::string pattern{};  // RE2 pattern for a part of the name; empty: every chosen tensor
  // Encoding "none" leaves the tensors unchanged. For GGUF files the encoding may also be a dtype
  // or, without a pattern, a mix, which assigns block formats by llama.cpp's rules.
  Quantization quantization{};
};

// Variant of the bytes to write: `exact` is the encoding's first dialect, and `compat` writes
// exactly the bytes that ModelOpt writes.
enum class QuantizeMode : std::uint8_t { exact, compat };

// Returns "exact" or "modelopt-compat".
[[nodiscard]] LOADSTONE_API std::string_view name(QuantizeMode mode) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<QuantizeMode> quantize_mode(
    std::string_view name) noexcept;

// Parses an encoding: "nf4", "NVFP4", "nf4:128" with a block size, "none"; for GGUF files also
// mixes ("q4_k_m") and dtypes ("bf16"). Throws Error "plan.options".
[[nodiscard]] LOADSTONE_API Quantization
parse_quantization(std::string_view text, QuantizeMode mode = QuantizeMode::exact,
                   FileFormat format = FileFormat::safetensors);

// The tensors to quantize: weights of linear layers in decoder layers, except those that inference
// servers expect unquantized (see src/convert/choose/quantize_rules.cpp), plus the tensors that
// match `include`, minus those that match `exclude`.
struct QuantizeOptions {
  // The first format that matches a tensor applies. The format without a pattern must be last.
  // Empty: nothing is quantized.
  std::vector<QuantizeFormat> formats{};
  std::vector<std::string> include{};  // RE2 patterns for a part of the name
  std::vector<std::string> exclude{};
  // Must be nullopt for the encodings of bitsandbytes, which have one style. For other encodings
  // nullopt means `unified`. A style without formats re-packs quantized tensors; no value changes.
  std::optional<QuantizeStyle> style{};
  // Report non-finite values as findings instead of Error "q.nan", and finite values that overflow
  // their new dtype, quantized or not, instead of Error "convert.overflow".
  bool allow_non_finite = false;
  // For GGUF files: the importance matrix. Null: the quantizer weights errors by the values alone,
  // and loadstone rejects the encodings with the fewest bits.
  std::shared_ptr<const ImportanceMatrix> importance{};
};

// A companion file of the model, such as a config or a tokenizer.
struct ExtraFile {
  std::string name{};                    // path in the target's folder: "config.json", "a/b.json"
  std::string text{};                    // the contents, if copy_of is empty
  std::string copy_of{};                 // path of the regular file (not a link) to copy
  std::shared_ptr<ByteSource> source{};  // reads copy_of if it is on another machine
};

// The companion files of a checkpoint's folder, and the files that a conversion leaves out.
struct ModelFolder {
  std::string config{};               // text of config.json; empty: the folder has no config
  std::vector<ExtraFile> files{};     // files to copy
  std::vector<std::string> links{};   // names of links, which are not copied
  std::vector<std::string> denied{};  // names of files that the server lacks or denies access to
  // Paths in modules.json or model_index.json that are not among `files`: components of a
  // pipeline, paths outside the folder, and files that are too large for a companion file.
  std::vector<std::string> left{};
  std::vector<std::string> code{};    // names of Python files that were not requested
  std::vector<std::string> others{};  // names of folders, and of weights of other checkpoints
};

// Lists a local folder; for any other path the result is empty. Includes all files of the folders
// that modules.json names. `with_code`: also lists Python files. Throws Error "io.read".
[[nodiscard]] LOADSTONE_API ModelFolder read_model_folder(const std::string& path,
                                                          bool with_code = false);

// Lists the folder of a checkpoint that was opened as `path`, a folder or an index, through the
// catalog's storage; a remote folder at the catalog's revision. A web server cannot list a folder,
// so loadstone requests each file name that it knows. It knows no names of Python files, so
// `with_code` is then Error "convert.extra".
[[nodiscard]] LOADSTONE_API ModelFolder read_model_folder(const Catalog& catalog,
                                                          const std::string& path,
                                                          bool with_code = false);

// Lists the parts of the local folder `source`, or of an index's folder, that a one-file output
// omits: `left` gets the folders that modules.json or model_index.json name, and `others` the
// adapters. All other fields are empty.
[[nodiscard]] LOADSTONE_API ModelFolder folders_left_out(const std::string& source);

struct ConvertOptions {
  // ---- These change the result.
  // Format to write: safetensors or GGUF.
  FileFormat format = FileFormat::safetensors;
  // Rules that change names and layouts; tensors that no rule matches keep their names.
  Rules rules{};
  // Recipes that were made for this catalog. Without rules they alone determine the output; with
  // rules, the rules apply to the tensors that no recipe reads.
  Recipes recipes{};
  // New dtype of floating-point tensors of 16 bits or more, of blocks, and of FP8 tensors without a
  // scale. nullopt: tensors keep their dtype. Codes always keep their dtype.
  std::optional<Dtype> dtype{};
  // F32, BF16 or F16: the dtype to which loadstone decodes blocks that the output format cannot
  // store, if `dtype` is not set. A GGUF file keeps the blocks if the rules leave every row whole.
  Dtype block_dtype = Dtype::bf16;
  // Decode quantized tensors, and FP8 tensors without scales, to `dtype` or else `block_dtype`.
  // `quantize` implies this for tensors that are re-encoded. Rules, and recipes that move codes,
  // are then not allowed, because names stay unchanged. The same applies to all rules and recipes
  // if the expert layout changes. If recipes yield values, a GGUF file may keep their MXFP4 and
  // NVFP4 codes only without this option.
  bool dequantize = false;
  ExpertLayout experts = ExpertLayout::keep;
  QuantizeOptions quantize{};
  // Keys to add to the source's metadata or to replace in it. The values are typed in a GGUF file
  // and strings in safetensors. A GGUF file needs "general.architecture", either from here or from
  // the source.
  Metadata metadata{};
  // GGUF files: allow tensors of more than 4 dims and names of more than 63 bytes, which ggml
  // rejects but programs for video models read.
  bool beyond_ggml = false;
  // Merge the joined models and adapters of the catalog. Not allowed together with rules, recipes
  // or expert layouts.
  std::optional<MergeOptions> merge{};
  // Companion files for the target's folder. loadstone declares the quantization in the config.
  ModelFolder folder{};
  // Reject the conversion with Error "convert.lossy" if a value would change: before reading if
  // encodings and shapes determine it, otherwise when the first changed block is found.
  bool require_lossless = false;
  // Policy for source tensors that no recipe reads.
  UnexpectedPolicy unexpected = UnexpectedPolicy::warn;
  // Write one file. If false, write a folder, with one file if that is enough, or with shards and
  // their index.
  bool one_file = true;
  // Write shards next to each other under the target's name, like llama.cpp: out.gguf becomes
  // out-00001-of-00003.gguf, or stays out.gguf if one file is enough. Requires GGUF, `one_file`
  // false and `stem` (the name without the suffix).
  bool is_split = false;
  // Prefix of file names in a folder: STEM.safetensors, STEM-00001-of-00002.safetensors ... Empty:
  // the name that the library of the config expects: "diffusion_pytorch_model" for diffusers
  // (recognised by `_class_name` in the config) and "model" for other libraries.
  std::string stem{};
  // Bytes of tensors per shard; a larger tensor gets a shard to itself.
  std::uint64_t shard_bytes_max = defaults::shard_bytes_max;
  // ---- These change only the cost.
  // Limit on the bytes in flight, for all threads together.
  std::uint64_t staging_bytes_max = defaults::convert_staging_bytes_max;
  // Limit of the conversion's total memory, lists of tensors included. If the limit is too small,
  // finding "plan.over_budget" reports the minimum.
  std::optional<std::uint64_t> memory_bytes_max{};
  unsigned threads = 0;  // 0: one per core, at most defaults::threads_max
};

// A tensor of an output file: a target, or one component of a quantized target.
struct OutputTensor {
  static constexpr std::uint32_t no_part = UINT32_MAX;

  std::uint32_t target = 0;      // index into Plan::targets
  std::uint32_t part = no_part;  // index into quantized_parts(); no_part: not a component
  std::string name{};
  Shape shape{};
  Encoding encoding = Dtype::u8;
  Constant constant{};       // the value, if it is known before loadstone reads anything
  bool is_inverted = false;  // the output is the reciprocal of the component, in F32
  std::uint64_t begin = 0;   // bytes after the header
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return end - begin; }
};

struct OutputFile {
  std::string name;  // relative to the target's folder; empty: the target itself
  std::vector<OutputTensor> tensors;
  std::uint64_t header_bytes = 0;  // all bytes before the data
  std::uint64_t data_bytes = 0;    // includes the format's padding between tensors

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return header_bytes + data_bytes; }
};

// A row of the quantization table: similar tensors, and their new encoding.
struct QuantizeRow {
  std::string names;  // with * in place of integers
  std::string shape;
  std::string before;    // "BF16"
  std::string after;     // "nvfp4"; the same as `before` if unchanged
  std::string reason{};  // why the tensors are unchanged; otherwise empty
  Fidelity fidelity = Fidelity::exact;
  // Unless exact: the root mean square error of normally distributed values that are not codes,
  // relative to their root mean square; 0 if unknown.
  double typical_error = 0;
  std::size_t tensors = 0;
  std::uint64_t bytes_before = 0;
  std::uint64_t bytes_after = 0;
};

// A quantized tensor whose codes are kept and re-packed into another style or into GGUF's blocks.
struct RepackedTensor {
  std::string name;  // name of the decoded tensor
  Shape shape;
  Quantization quantization;
  std::vector<std::string> targets{};  // the plan's targets that are its components
  // The largest relative change of a scale, if F32 has no exact inverse of the global scale.
  double error = 0;
};

// Plain data from make_conversion(). Thread-safe while nobody writes to it.
struct Conversion {
  Plan plan;  // its targets are the output's tensors; its peak is the conversion's peak
  std::vector<OutputFile> files;
  std::string index_name;  // relative to the target's folder; empty: no index is written
  FileFormat format = FileFormat::safetensors;
  Metadata metadata;              // for the header of every file; in a split GGUF only of the first
  std::vector<ExtraFile> extras;  // companion files of a folder; written with the index
  std::vector<QuantizeRow> quantize_rows;  // empty if nothing is quantized
  bool require_lossless = false;           // see ConvertOptions
  std::vector<RepackedTensor> repacked;
  bool one_file = true;
  bool is_split = false;  // several files next to each other, see ConvertOptions::is_split
  std::string stem;
  // Texts of the options that determine the tensors and files, by name ("dtype"), for messages.
  // Options without a value have none.
  std::map<std::string, std::string> options;
  // Text of the output's config.json; empty if the source has none. If the target's folder already
  // has a config that the conversion does not replace, that config must declare the same codes. It
  // may tie names that have separate tensors only if the source's config does so too or is missing.
  std::string config;
  bool has_codes = false;
  bool has_tie = false;
  Budget budget;
  std::uint64_t digest_bytes = 0;  // memory for bytes that wait to be hashed, see docs/receipt.md
  // Includes the second read of tensors that are measured before they are encoded or merged.
  // Transposed tensors may be read more often.
  std::uint64_t bytes_to_read = 0;
  std::uint64_t bytes_to_write = 0;
  // Peak memory, in addition to the process's memory before the catalog is opened.
  std::uint64_t peak_bytes = 0;

  [[nodiscard]] bool ok() const noexcept { return plan.ok(); }
};

// Plans a conversion. Reads configs, companion files, small tensors (scales, alphas, quant
// states), and the adapter matrices for tied names. Writes nothing. Throws Error "plan.rules" and
// "plan.options" like make_plan(), and the errors of reads.
[[nodiscard]] LOADSTONE_API Conversion make_conversion(std::shared_ptr<const Catalog> catalog,
                                                       const ConvertOptions& options = {});

// One of `count` shares of the output's shards. Different processes may write different shares at
// the same time.
struct ConvertPart {
  std::uint32_t index = 1;  // from 1 to count
  std::uint32_t count = 1;
};

// Returns the format for a target's name: names with ".safetensors" or ".gguf" are files of that
// format; nullopt for other names, which are folders. Throws Error "convert.target" for the suffix
// of a format that loadstone does not write, such as "x.pt"; "x.pt/" is a folder.
[[nodiscard]] LOADSTONE_API std::optional<FileFormat> format_of_target(std::string_view target);

// Use of the system's page cache for the files that are read and written. `automatic` releases
// pages if reads and writes exceed half of the machine's memory, because they would evict the pages
// of other programs. Pages of sources that were cached before are kept.
enum class PageCache : std::uint8_t { automatic, keep, release };

// Returns "auto", "keep" or "release".
[[nodiscard]] LOADSTONE_API std::string_view name(PageCache choice) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<PageCache> parse_page_cache(
    std::string_view text) noexcept;

// Scope of one call of convert(). The defaults do the whole conversion from the beginning.
struct ConvertRun {
  // Keep the shards that an earlier run of the same conversion finished, and keep the shards of
  // this run even if it fails. A target of one file has no shards and starts again.
  bool resume = false;
  // Write only this share. Its shards stay in a folder next to the target until a run with
  // `finish`.
  std::optional<ConvertPart> part{};
  // Check that all shards exist, and move them to their final names.
  bool finish = false;
  // Replace a model in the target's place even if loadstone did not write it, or it has changed
  // since.
  bool overwrite = false;
  // Kind of digest in the receipt, which is receipt.json in a folder, else TARGET.receipt.json;
  // nullopt: no receipt. The shards of a folder always have digests (by default XXH3-128), which a
  // resumed run compares. For a receipt of a different kind, it reads finished shards and their
  // sources again.
  std::optional<DigestKind> receipt = {};
  PageCache page_cache = PageCache::automatic;
  Observer* observer = nullptr;  // receives progress, and can stop the run
  Storage* storage = nullptr;    // for sources and target; null: the catalog's storage
};

// An encoding whose tensors were codes before, and were encoded again.
struct RequantizedTensors {
  std::string encoding;
  std::uint64_t tensors = 0;
  EncodingLoss loss;
};

struct ConvertReport {
  std::vector<std::string> outputs;  // paths of the files that were written, the receipt last
  std::vector<Finding> findings;
  double seconds = 0;
  double sync_seconds = 0;  // part of `seconds` spent flushing files to disk, in any thread
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_read_ahead = 0;  // requested in advance because the page cache lacked them
  std::uint64_t bytes_kept = 0;        // in shards that earlier runs finished
  std::uint64_t bytes_checked = 0;     // read for that, of shards and sources; not in bytes_read
  std::uint64_t peak_bytes = 0;        // as planned, with the actual staging
  // The choice that the run applied: `keep` or `release`.
  PageCache page_cache = PageCache::keep;
  // Sorted by encoding. Includes files that earlier runs finished.
  std::vector<RequantizedTensors> requantized;
};

// Checks that the target may be written. Throws Error "convert.target" if the target is a source,
// is inside the source's folder of shards, or is a folder with a model that is not an older output
// of this name; "convert.extra" if a companion file cannot be copied. convert() calls this first,
// and a dry run may call it too. Returns the finding "io.no_space", an error, if the disk is too
// full, "convert.target", an error, if the target has files that no earlier conversion into it
// wrote, and warnings about files of another model that stay in the target's folder. The report of
// convert() repeats the warnings. For a resumed run, also returns the finding "convert.resumed", or
// throws Error "convert.state" if the work of the earlier run belongs to a different conversion.
LOADSTONE_API std::vector<Finding> check_target(const Conversion& conversion,
                                                const std::string& target,
                                                const ConvertRun& run = {});

// The work that is left for a run.
struct WorkLeft {
  // Includes the finished shards, which the run checks. Estimated if the run writes only a part of
  // the files.
  std::uint64_t bytes_to_read = 0;
  std::uint64_t bytes_to_write = 0;
  std::uint64_t bytes_kept = 0;  // in the finished shards
};

// Returns the work that is left for a run. `findings`: the result of check_target(). Reads only the
// headers of finished shards.
[[nodiscard]] LOADSTONE_API WorkLeft work_left(const Conversion& conversion,
                                               const std::string& target, const ConvertRun& run,
                                               const std::vector<Finding>& findings = {});

// Returns the indices of a share's files. Shares are balanced by bytes, and every process computes
// the same shares.
[[nodiscard]] LOADSTONE_API std::vector<std::uint32_t> files_of_part(const Conversion& conversion,
                                                                     const ConvertPart& part);

// Writes the target: a file, or the files of a folder. Replaces the output of an earlier
// conversion, which the record .loadstone-NAME.done next to the target identifies. Only complete
// files appear under their final names. Until then they are in a folder .loadstone-NAME.part next
// to the target, where each complete shard has its own name. A new run that fails or is stopped
// leaves nothing. A killed process leaves that folder, which the next run takes over or removes.
// Before it writes anything, throws the errors among the findings, and errors for sources that have
// changed. Also throws Error "convert.locked" if another process does the same work,
// "convert.state" if the folder belongs to another conversion, and "convert.incomplete" if shards
// to finish are missing.
LOADSTONE_API ConvertReport convert(const Conversion& conversion, const std::string& target,
                                    const ConvertRun& run = {});

// Writes the data of one file, without its header, into memory: `data` has the file's data_bytes,
// and each tensor is written at its `begin`. Padding between tensors is not written. Returns the
// number of bytes read. Several threads may make different files, in any order;
// ConvertOptions::shard_bytes_max determines the size of the files. Throws the read errors of
// convert(); the contents of `data` are then undefined.
LOADSTONE_API std::uint64_t convert_in_memory(const Conversion& conversion, std::uint32_t file,
                                              std::span<std::byte> data,
                                              Observer* observer = nullptr,
                                              Storage* storage = nullptr);

[[nodiscard]] LOADSTONE_API std::string to_json(const ConvertReport& report);
// Returns one line per encoding: "nvfp4: 96 of 96 blocks exact (2 tensors)".
[[nodiscard]] LOADSTONE_API std::string to_text(const std::vector<RequantizedTensors>& encodings);
// Returns the conversion as JSON: {"files", "tensors", "metadata", "threads", "bytes_to_read" ...}
[[nodiscard]] LOADSTONE_API std::string to_json(const Conversion& conversion);
// Returns the conversion as text: files, dtypes before and after, totals and, if `with_tensors`,
// one row per tensor.
[[nodiscard]] LOADSTONE_API std::string to_table(const Conversion& conversion, bool with_tensors);

}  // namespace loadstone
