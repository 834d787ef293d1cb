// One checkpoint made into another, file to file, in memory that is bounded whatever the size of
// tensors and files.
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

// How experts are stored: each by itself ("mlp.experts.3.up_proj.weight"), or all of a layer in one
// tensor ("mlp.experts.gate_up_proj" [experts, 2 * inner, hidden], "mlp.experts.down_proj").
enum class ExpertLayout : std::uint8_t { keep, fused, separate };

// "keep", "fused", "separate"
[[nodiscard]] LOADSTONE_API std::string_view name(ExpertLayout layout) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<ExpertLayout> expert_layout(
    std::string_view name) noexcept;

// Whose names, shapes and configs the parts of quantized tensors get: `unified` is what ModelOpt
// calls its exports, `gguf` are tensors of a block format under their own names. Those of
// bitsandbytes' encodings are always its own.
enum class QuantizeStyle : std::uint8_t { unified, compressed_tensors, gguf };

// "modelopt", "compressed-tensors", "gguf"
[[nodiscard]] LOADSTONE_API std::string_view name(QuantizeStyle style) noexcept;

// Format for tensors whose name matches `pattern`.
struct QuantizeFormat {
  std::string pattern{};  // RE2 syntax, anywhere in the name; empty: all that are chosen
  // Encoding "none": they stay as they are. In files of GGUF it may be a plain type, or without a
  // pattern a mix, which gives types by llama.cpp's rules.
  Quantization quantization{};
};

// Whose bytes files get: those of the encoding's first dialect, or those that ModelOpt writes.
enum class QuantizeMode : std::uint8_t { exact, compat };

// "exact", "modelopt-compat"
[[nodiscard]] LOADSTONE_API std::string_view name(QuantizeMode mode) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<QuantizeMode> quantize_mode(
    std::string_view name) noexcept;

// An encoding as users write it: "nf4", "NVFP4", "nf4:128" with a block size, "none"; for files of
// GGUF also mixes ("q4_k_m") and plain types ("bf16"). Throws Error "plan.options".
[[nodiscard]] LOADSTONE_API Quantization
parse_quantization(std::string_view text, QuantizeMode mode = QuantizeMode::exact,
                   FileFormat format = FileFormat::safetensors);

// Which tensors are quantized: weights of linear layers inside decoder layers, less what servers
// want plain (src/convert/choose/quantize_rules.cpp says which), plus `include`, less `exclude`.
struct QuantizeOptions {
  // The first that fits, and the one without a pattern last; none at all: nothing is quantized.
  std::vector<QuantizeFormat> formats;
  std::vector<std::string> include;  // RE2 syntax, anywhere in the name
  std::vector<std::string> exclude;
  // Those of bitsandbytes have one style, and none may be named; for others none means `unified`.
  // A style without formats: quantized tensors get its components, and no number changes.
  std::optional<QuantizeStyle> style;
  // NaN and infinities become findings instead of Error "q.nan"; so do finite numbers that are too
  // large for the dtype they become, quantized or not, instead of Error "convert.overflow".
  bool allow_non_finite = false;
  // GGUF files: tensors take the entries that have their names. Null: the numbers alone decide,
  // and encodings of the fewest bits are refused.
  std::shared_ptr<const ImportanceMatrix> importance{};
};

// A small file that stands beside the model's: a config, a tokenizer.
struct ExtraFile {
  std::string name{};                    // below the target's folder: "config.json", "a/b.json"
  std::string text{};                    // what it holds, where copy_of is empty
  std::string copy_of{};                 // path of a regular file (no link) that it is a copy of
  std::shared_ptr<ByteSource> source{};  // of a file of another machine: what it is read through
};

// What stands beside a checkpoint in its folder.
struct ModelFolder {
  std::string config{};               // text of config.json; empty: there is none
  std::vector<ExtraFile> files{};     // the files that come along, as copies
  std::vector<std::string> links{};   // names of those that are links, and are passed over
  std::vector<std::string> denied{};  // names of those that another machine does not hand out
  // Below the folder, named by its modules.json or model_index.json, and not among `files`:
  // components of a pipeline, paths that leave the folder, files too large for a companion.
  std::vector<std::string> left{};
  std::vector<std::string> code{};    // names of Python files that were not requested
  std::vector<std::string> others{};  // names of weights that are not the checkpoint's, of folders
};

// Lists a folder of this machine; the list of another kind of path is empty. The folders below that
// modules.json names come along with all their files. `with_code`: Python files too. Throws Error
// "io.read".
[[nodiscard]] LOADSTONE_API ModelFolder read_model_folder(const std::string& path,
                                                          bool with_code = false);

// Lists the folder of a checkpoint that was opened by `path`, through the catalog's storage; a
// remote one at the catalog's revision. A web server cannot list a folder, so it gets a request for
// each known name. Python files have no known names: Error "convert.extra".
[[nodiscard]] LOADSTONE_API ModelFolder read_model_folder(const Catalog& catalog,
                                                          const std::string& path,
                                                          bool with_code = false);

// For an output that is one file and so leaves all others: `left` has the folders that modules.json
// or model_index.json of this machine's folder `path` names, `others` its adapters; no more.
[[nodiscard]] LOADSTONE_API ModelFolder folders_left_out(const std::string& path);

struct ConvertOptions {
  // ---- what changes the result
  // Of the files that are written: safetensors or GGUF.
  FileFormat format = FileFormat::safetensors;
  // What becomes of names and layouts; tensors that no rule matches keep their names.
  Rules rules;
  // Made for this catalog. They alone decide what the output holds, unless there are rules too:
  // those get what no recipe reads.
  Recipes recipes;
  // Floating tensors of 16 bits and more get this dtype, and so do blocks and FP8 tensors to which
  // no scale belongs. None: tensors keep theirs. Codes keep theirs always.
  std::optional<Dtype> dtype;
  // Blocks of numbers become F32, BF16 or F16 where `dtype` says nothing and the file cannot hold
  // them as they are. A GGUF file keeps blocks whose rows stay whole.
  Dtype block_dtype = Dtype::bf16;
  // Quantized tensors and FP8 without scales become numbers, of `dtype` or else `block_dtype`;
  // `quantize` implies it for those that are encoded again. Names then stay as they are, and so
  // where experts change their layout: no rules and recipes beside these.
  bool dequantize = false;
  ExpertLayout experts = ExpertLayout::keep;
  QuantizeOptions quantize;
  // Keys that are added to the source's metadata, or replace them. A GGUF file has them typed, and
  // needs "general.architecture" from one of the two; safetensors have them as text.
  Metadata metadata;
  // GGUF files: tensors of more than 4 dims and names of more than 63 bytes, which ggml refuses and
  // programs for video models read.
  bool beyond_ggml = false;
  // The catalog joins models and adapters, which become one. No rules, recipes and layouts of
  // experts beside it.
  std::optional<MergeOptions> merge;
  // What the target's folder gets beside the model; its config says what was quantized.
  ModelFolder folder;
  // Sources that recipes leave over.
  UnexpectedPolicy unexpected = UnexpectedPolicy::warn;
  // One file; else a folder: one file there where that is enough, or shards and their index.
  bool one_file = true;
  // Shards that stand beside one another under the target's name, as llama.cpp has them: out.gguf
  // becomes out-00001-of-00003.gguf, or out.gguf where one is enough. `stem` is its name without
  // the suffix, and `one_file` false. GGUF files only.
  bool is_split = false;
  // Begins the names of files in a folder: STEM.safetensors, STEM-00001-of-00002.safetensors ...
  // Empty: the name that the library of the config looks for, "diffusion_pytorch_model" for
  // diffusers (`_class_name`) and "model" for others.
  std::string stem;
  // Of tensors; a larger tensor has its own shard.
  std::uint64_t shard_bytes_max = defaults::shard_bytes_max;
  // ---- what changes cost only
  // All threads together: bytes on their way.
  std::uint64_t staging_bytes_max = defaults::convert_staging_bytes_max;
  // All that the conversion takes, lists of tensors included. Where that is not enough the plan is
  // refused: finding "plan.over_budget" with the least that would be.
  std::optional<std::uint64_t> memory_bytes_max;
  unsigned threads = 0;  // 0: one per core, at most defaults::threads_max
};

// A tensor of an output file: a target, or one part of a target that is quantized.
struct OutputTensor {
  static constexpr std::uint32_t no_part = UINT32_MAX;

  std::uint32_t target = 0;      // index into Plan::targets
  std::uint32_t part = no_part;  // of quantized_parts(); none: the target, or a constant beside it
  std::string name{};
  Shape shape{};
  Encoding encoding = Dtype::u8;
  Constant constant{};       // known before anything is read
  bool is_inverted = false;  // F32: one divided by what the part holds
  std::uint64_t begin = 0;   // bytes from the first one after the header
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return end - begin; }
};

struct OutputFile {
  std::string name;  // in the target's folder; empty: the target itself
  std::vector<OutputTensor> tensors;
  std::uint64_t header_bytes = 0;  // all bytes before the data
  std::uint64_t data_bytes = 0;    // with the zeros between tensors, where the format asks for some

  [[nodiscard]] std::uint64_t byte_count() const noexcept { return header_bytes + data_bytes; }
};

// Like tensors, and what becomes of them.
struct QuantizeRow {
  std::string names;  // with * in place of numbers
  std::string shape;
  std::string before;    // "BF16"
  std::string after;     // "nvfp4"; what it was where it is left alone
  std::string reason{};  // why it is left alone; else empty
  std::size_t tensors = 0;
  std::uint64_t bytes_before = 0;
  std::uint64_t bytes_after = 0;
};

// Numbers whose codes go out as they are, in the layout of another style or of GGUF's blocks.
struct RepackedTensor {
  std::string name;  // of the numbers
  Shape shape;
  Quantization quantization;
  std::vector<std::string> targets{};  // of the plan: the components
};

// Plain data, made by make_conversion(). Thread-safe while nobody writes to it.
struct Conversion {
  Plan plan;  // its targets are the output's tensors; its peak is the conversion's
  std::vector<OutputFile> files;
  std::string index_name;  // in the target's folder; empty where there is no index
  FileFormat format = FileFormat::safetensors;
  Metadata metadata;              // of every file's header; of a split GGUF the first one's
  std::vector<ExtraFile> extras;  // of a folder; written with the index
  std::vector<QuantizeRow> quantize_rows;  // where something is quantized: what becomes of what
  std::vector<RepackedTensor> repacked;    // by which no number changes
  bool one_file = true;
  bool is_split = false;  // several files beside one another
  std::string stem;
  // The text of config.json for the output; empty if the source has none. A config at the target
  // that safetensors do not replace must declare codes if there are any, in its words, and may tie
  // names that have a tensor each only if the source does, or has no config.
  std::string config;
  bool has_codes = false;
  bool has_tie = false;
  Budget budget;
  std::uint64_t digest_bytes = 0;   // for bytes that wait to be hashed, see docs/receipt.md
  std::uint64_t bytes_to_read = 0;  // each byte once; what is turned may be read again
  std::uint64_t bytes_to_write = 0;
  std::uint64_t peak_bytes = 0;  // beside what the process has before it opens the checkpoint

  [[nodiscard]] bool ok() const noexcept { return plan.ok(); }
};

// Plans a conversion. Reads configs, files next to the model, small tensors (scales, alphas, quant
// states), and matrices of adapters for tied names. Writes nothing. Throws Error "plan.rules" and
// "plan.options" as make_plan() does, and those of reading.
[[nodiscard]] LOADSTONE_API Conversion make_conversion(std::shared_ptr<const Catalog> catalog,
                                                       const ConvertOptions& options = {});

// One of so many shares of the output's shards; different processes may do them at once.
struct ConvertPart {
  std::uint32_t index = 1;  // from 1 to count
  std::uint32_t count = 1;
};

// Told by the target's name: ".safetensors" and ".gguf" are one file of that format, other names
// are folders. Throws Error "convert.target" for a target that is named like a file of a format
// that is not written: "x.pt" would become a folder of that name ("x.pt/" says that it is to).
[[nodiscard]] LOADSTONE_API std::optional<FileFormat> format_of_target(std::string_view target);

// Whether pages of the files that are read and written stay in the system's page cache. `automatic`
// releases them where reading and writing come to more than half of the machine's memory: they
// would push out what other programs need. Of sources, those that were not in the cache before.
enum class PageCache : std::uint8_t { automatic, keep, release };

// "auto", "keep", "release"
[[nodiscard]] LOADSTONE_API std::string_view name(PageCache choice) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<PageCache> parse_page_cache(
    std::string_view text) noexcept;

// What one call does of a conversion. As it stands: all of it, from the beginning.
struct ConvertRun {
  // Shards that an earlier run of the same conversion finished are kept, and so are those of this
  // one however it ends. One file has no shards, and is begun again.
  bool resume = false;
  // This share only: its shards wait beside the target until a run with `finish`.
  std::optional<ConvertPart> part;
  // Checks that all shards are there, and gives them their names.
  bool finish = false;
  // A receipt is written beside the output: receipt.json in a folder, else TARGET.receipt.json. The
  // same for all parts. Shards of a folder have digests without it too, by XXH3-128: a run that
  // goes on reads them.
  std::optional<DigestKind> receipt = {};
  PageCache page_cache = PageCache::automatic;
  Observer* observer = nullptr;  // receives the progress, and can stop the run
  Storage* storage = nullptr;    // of sources and target; null: the catalog's
};

struct ConvertReport {
  std::vector<std::string> outputs;  // paths of the files, the receipt last
  std::vector<Finding> findings;
  double seconds = 0;
  double sync_seconds = 0;  // of them, bringing files to the disk by whatever thread
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_read_ahead = 0;      // that the page cache lacked, and was asked for
  std::uint64_t bytes_kept = 0;            // of files that earlier runs finished
  std::uint64_t peak_bytes = 0;            // as planned, with the staging that was really used
  PageCache page_cache = PageCache::keep;  // what was done: `keep` or `release`
};

// Whether the target may be written: Error "convert.target" where it is a source, lies among the
// shards of the source, or is a folder that holds a model that is no older output of this name;
// "convert.extra" where a file that is to stand beside the model cannot be copied; "io.no_space"
// where the disk has no room. convert() asks first; a dry run may want to know too. Returns
// warnings about files of another model that stay there, which the report has as well.
LOADSTONE_API std::vector<Finding> check_target(const Conversion& conversion,
                                                const std::string& target,
                                                const ConvertRun& run = {});

// Which files a share has: balanced by bytes, the same in every process.
[[nodiscard]] LOADSTONE_API std::vector<std::uint32_t> files_of_part(const Conversion& conversion,
                                                                     const ConvertPart& part);

// Writes the target: a file that is replaced, or a folder. Under its name nothing appears but what
// is whole; until then files are in a folder beside it called .loadstone-NAME.part, each shard
// under its own name when it is whole. Where a run that begins anew fails or is stopped nothing is
// left; a process that is killed leaves that folder, which the next run takes over or removes.
// Errors among the findings, and sources that have changed, are thrown before anything is written;
// "convert.locked" where another process is at the same work, "convert.state" where what is there
// belongs to another conversion, "convert.incomplete" where there is nothing whole to finish.
LOADSTONE_API ConvertReport convert(const Conversion& conversion, const std::string& target,
                                    const ConvertRun& run = {});

// What convert() writes to one of the files, less its header, in memory instead: `data` is as large
// as the file's data_bytes, and its tensors stand from begin to end. Where the format leaves a gap
// between tensors, what was there stays. Returns the bytes that were read. Files are made in any
// order, by several threads if need be; shard_bytes_max says how large they are. Errors are those
// of convert() that have to do with reading; `data` is then of no use.
LOADSTONE_API std::uint64_t convert_in_memory(const Conversion& conversion, std::uint32_t file,
                                              std::span<std::byte> data,
                                              Observer* observer = nullptr,
                                              Storage* storage = nullptr);

[[nodiscard]] LOADSTONE_API std::string to_json(const ConvertReport& report);
// What would be done: {"files", "tensors", "metadata", "threads", "bytes_to_read" ...}
[[nodiscard]] LOADSTONE_API std::string to_json(const Conversion& conversion);
// For people: files, dtypes before and after, totals; with a row a tensor on request.
[[nodiscard]] LOADSTONE_API std::string to_table(const Conversion& conversion, bool with_tensors);

}  // namespace loadstone
