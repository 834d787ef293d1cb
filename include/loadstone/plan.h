// Plans: the recipe, placement and origin of every target, decided before a weight is read. No
// threads, no clock. Reads only deciding data of the checkpoint: configs, quant states, and
// adapters' alphas and matrices for tied names.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/defaults.h"
#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/merge_options.h"
#include "loadstone/quantization.h"
#include "loadstone/recipe.h"
#include "loadstone/skeleton.h"

namespace loadstone {

// Policy for targets that the checkpoint lacks. `keep` keeps the value in the live model (origin
// kept); a target without one is missing.
enum class MissingPolicy : std::uint8_t { error, initialise, zeros, keep };
enum class UnexpectedPolicy : std::uint8_t { warn, error, ignore };
enum class DeviceMapMode : std::uint8_t { automatic, balanced, balanced_low_0, sequential };

// Returns the name in Python and in the command: "zeros", "warn", "auto" ...
[[nodiscard]] LOADSTONE_API std::string_view name(MissingPolicy policy) noexcept;
[[nodiscard]] LOADSTONE_API std::string_view name(UnexpectedPolicy policy) noexcept;
[[nodiscard]] LOADSTONE_API std::string_view name(DeviceMapMode mode) noexcept;

// Placement of modules. Devices are strings that include the index. An entry is
// a module path ("" is the whole model) with a device: "cpu", "disk", "cuda:0" ..., or "meta" (no
// value; a named exception). The longest matching entry wins.
struct DeviceMap {
  std::optional<DeviceMapMode> mode;  // computed from sizes and max_memory, ignoring entries
  std::vector<std::pair<std::string, std::string>> entries;
  // An entry that matches nothing in the model is an error, finding "plan.device_map". A skeleton
  // does not show modules without tensors, so they are listed here.
  std::set<std::string, std::less<>> bare_modules;
  // Report a warning instead, for maps of libraries that ignore such entries.
  bool allows_unknown = false;

  [[nodiscard]] bool empty() const noexcept { return !mode && entries.empty(); }
};

// For adapters, which know how a library loads the model. Other callers leave it empty.
struct CallerKnowledge {
  // Sources that the caller handles: exempt from rules, from equal names and from "unexpected".
  // Names that the checkpoint lacks are ignored.
  std::vector<std::string> known_sources;
  bool knows_all_sources = false;  // the caller handles every source that no recipe reads
  // For targets that the checkpoint lacks: the expected source name, and a policy that takes
  // precedence over all others. The caller reports its own finding for those `explained`.
  std::map<std::string, std::string, std::less<>> expected_sources;
  std::map<std::string, MissingPolicy, std::less<>> missing_of;
  std::set<std::string, std::less<>> explained;
};

struct PlanOptions {
  // ---- These change the result.
  Rules rules;
  // Prefixes to strip from the checkpoint's names if all names have it and none matches the model
  // unchanged. If only some have it, finding "plan.prefix" suggests a rule. nullopt:
  // defaults::strip_prefixes.
  std::optional<std::vector<std::string>> strip_prefixes;
  // Take precedence over rules, which do not match the sources that recipes read. Invalid ones are
  // findings "plan.box", "plan.shape" or "plan.recipe".
  Recipes recipes;
  CallerKnowledge caller;
  // Regular expressions (RE2 syntax) for whole names, with the policy for matches; the first match
  // wins.
  std::vector<std::pair<std::string, MissingPolicy>> missing_patterns;
  // Dtype of parameters and persistent floating-point buffers, but never of non-persistent buffers
  // and attributes. nullopt: the skeleton's dtype.
  std::optional<Dtype> dtype;
  bool dtype_from_file = false;  // "auto": they keep the file's dtype
  // Non-finite values to quantize become warning "q.nan" instead of Error "q.nan" at the time they
  // are read.
  bool allow_non_finite = false;
  // Targets to quantize during the load, after the cast to their dtype. A name that is not a target
  // is Error "plan.options".
  std::map<std::string, Quantization, std::less<>> quantize;
  // Adapters to add to the targets during the load. The catalog joins the checkpoint and these, in
  // this order; their modules are the model's or the checkpoint's. Mismatches are finding
  // "merge.adapter", unused tensors of an adapter "merge.unused". Planning reads small tensors and
  // configs, as for quantized tensors.
  std::vector<MergeAdapter> adapters;
  // Policy for ties of which adapters change some names only: finding "merge.tie".
  TiePolicy tie = TiePolicy::split;
  DeviceMap device_map;  // empty: the live model's devices, else "cpu"
  // Bytes per device: capacities in order of preference for a computed map, limits for an explicit
  // one (finding "plan.over_budget").
  std::vector<std::pair<std::string, std::uint64_t>> max_memory;
  std::vector<std::string>
      no_split_modules;  // module paths that a computed map keeps on one device
  // Required if something placed on "disk" cannot be read from the shard unchanged.
  std::string offload_folder;
  MissingPolicy missing = MissingPolicy::error;
  UnexpectedPolicy unexpected = UnexpectedPolicy::warn;
  // ---- These change only the cost.
  // Memory for bytes in flight, all threads together.
  std::uint64_t staging_bytes_max = defaults::staging_bytes_max;
  // Readers that the plan assumes; 0: one per core, from first_readers_max to threads_max of
  // defaults.h. More may execute it, with no more memory.
  unsigned threads = 0;
  // Processes of this machine that load at the same time, including this one. They share the pinned
  // memory of a single one, so each copies to GPUs in smaller parts.
  unsigned local_ranks = 1;
  // Return views of the file for unchanged tensors: no memory, but the file must not change while
  // the model lives. Never for files read over a network.
  bool mmap = false;
};

// The way in which a target's value is delivered.
enum class Delivery : std::uint8_t {
  none,        // no bytes move: constructor, tie, excluded ...
  memory,      // written into the destination
  file_view,   // a view of the shard (options.mmap)
  disk_write,  // offloaded: written to the offload folder
  disk_keep,   // offloaded: stays in the shard, in this dtype or one that its reader casts
};

[[nodiscard]] LOADSTONE_API std::string_view name(Delivery delivery) noexcept;

struct LOADSTONE_API PlannedTarget {
  std::string name;
  TargetKind kind = TargetKind::parameter;
  Shape shape;  // of the tensor in the live model
  // Begin of this slice within the whole tensor, by dimension. Empty: it is not a slice.
  std::vector<std::uint64_t> slice_begin;
  std::vector<std::uint64_t> slice_groups;  // as Slice::groups
  Dtype dtype = Dtype::f32;                 // final, or before quantization
  std::string device;                       // as in DeviceMap::entries
  Delivery delivery = Delivery::none;
  Recipe recipe;                             // of the value, before quantization
  std::optional<Quantization> quantization;  // if set, its components are delivered

  // Bytes to deliver.
  [[nodiscard]] std::uint64_t byte_count() const;
};

// Two names of one tensor that the checkpoint both has. A load compares their values before it
// reads the others, and reports a difference as finding "plan.tie".
struct TieCheck {
  std::string name;         // the target that is a tie
  std::string tied_to;      // the target that it is tied to
  std::uint32_t taken = 0;  // the loaded source: index into the catalog's tensors
  std::uint32_t other = 0;  // the source of the other name
  bool is_error = false;    // a difference fails the load
};

// Plain data from make_plan() or plan_from_json(), which check every box against catalog and
// target; execute() relies on that. Thread-safe while nobody writes to it.
struct Plan {
  std::shared_ptr<const Catalog> catalog;
  std::vector<PlannedTarget> targets;  // in the skeleton's order
  std::vector<Decoding> decodings;     // further sources of boxes
  std::vector<TieCheck> tie_checks;
  std::vector<Finding> findings;  // sorted, including the catalog's
  std::string offload_folder;
  bool allow_non_finite = false;  // in tensors to quantize
  std::uint64_t staging_bytes_max = 0;
  unsigned threads = 1;
  unsigned local_ranks = 1;
  std::uint64_t bytes_to_read = 0;
  std::uint64_t bytes_to_write = 0;  // to the offload folder
  // Memory of the loaded model per device, including constructor and initialiser values (the former
  // may exist before the load, but a load creates tables of a hundred megabytes). "cpu" includes
  // the staging that is really needed; "disk" is the bytes written.
  std::map<std::string, std::uint64_t> peak_bytes;
  // Devices of modules, as given or computed. Empty: everything on "cpu".
  std::vector<std::pair<std::string, std::string>> device_map;

  [[nodiscard]] bool ok() const noexcept { return !has_errors(findings); }
};

// Problems of the checkpoint are Plan::findings, not exceptions. Throws Error "plan.rules" for
// invalid rules, "plan.options" for contradictory options, "skeleton.json" for an invalid skeleton.
[[nodiscard]] LOADSTONE_API Plan make_plan(std::shared_ptr<const Catalog> catalog,
                                           const Skeleton& skeleton,
                                           const PlanOptions& options = {});

// Throws the first error among the findings as an Error; its message counts the others.
LOADSTONE_API void require_ok(const Plan& plan);

// Writes a plan as JSON, with each shard's relative path, size, modification time, inode and header
// digest.
[[nodiscard]] LOADSTONE_API std::string to_json(const Plan& plan);

// Paths to use with a plan from a file, which is not trusted to name them.
struct PlanPaths {
  // The checkpoint's folder, or its one file. Empty: the plan's root, if it is in `plan_folder` or
  // its files are the planned ones (by size and inode); else `plan_folder`, if it has the shards.
  std::string root = {};
  // The same for the other checkpoints (adapters), in the plan's order. Empty strings and omitted
  // entries: as for `root`.
  std::vector<std::string> other_roots = {};
  // The folder that the plan was read from; empty: none.
  std::string plan_folder = {};
  // Folder for tensors placed on disk. The plan's own is never used: Error "plan.offload_folder" if
  // the plan needs one and this is empty.
  std::string offload_folder = {};
  // Allow contact with a URL stored in the plan (default: Error "plan.remote"). A URL passed in
  // `root` is always allowed.
  bool allow_remote = false;
};

// Opens the shards again and trusts nothing: a shard with a different size or header is Error
// "io.changed" (a different modification time is warning "io.time"); a box, shape or size that does
// not fit catalog and target is Error "plan.box" or "plan.json".
[[nodiscard]] LOADSTONE_API Plan plan_from_json(std::string_view text,
                                                const OpenOptions& options = {},
                                                const PlanPaths& paths = {});

// Returns the plan as text: one row per target (runs of similar rows folded), findings, totals.
[[nodiscard]] LOADSTONE_API std::string to_table(const Plan& plan);

}  // namespace loadstone
