// What will happen: for every target its recipe, its placement and its origin, decided before a
// weight is read. No threads, no clock. Of the checkpoint it reads only what decides: configs,
// quant states, and of adapters alphas and the matrices for tied names.
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

// For targets that the checkpoint lacks. `keep`: they keep the value that the model at hand holds
// (origin kept); one that holds none is missing.
enum class MissingPolicy : std::uint8_t { error, initialise, zeros, keep };
enum class UnexpectedPolicy : std::uint8_t { warn, error, ignore };
enum class DeviceMapMode : std::uint8_t { automatic, balanced, balanced_low_0, sequential };

// Returns the name in Python and in the command: "zeros", "warn", "auto" ...
[[nodiscard]] LOADSTONE_API std::string_view name(MissingPolicy policy) noexcept;
[[nodiscard]] LOADSTONE_API std::string_view name(UnexpectedPolicy policy) noexcept;
[[nodiscard]] LOADSTONE_API std::string_view name(DeviceMapMode mode) noexcept;

// Where modules live. Devices are names, since there is one for each index. Entries are module
// paths ("" is the whole model) with a device: "cpu", "disk", "cuda:0" ..., or "meta" (left without
// a value, as a named exception). The longest entry wins.
struct DeviceMap {
  std::optional<DeviceMapMode>
      mode;  // computed from sizes and max_memory; entries are then ignored
  std::vector<std::pair<std::string, std::string>> entries;
  // An entry that names nothing of the model is finding "plan.device_map", an error. Modules
  // without tensors, which a skeleton does not show, are named here.
  std::set<std::string, std::less<>> bare_modules;
  // A warning in its place: for maps of libraries that pass over such entries.
  bool allows_unknown = false;

  [[nodiscard]] bool empty() const noexcept { return !mode && entries.empty(); }
};

// For callers that know how a library loads the model, such as adapters. Others leave it empty.
struct CallerKnowledge {
  // Sources that the caller answers for: matched by no rule and no equal name, never unexpected.
  // Names that the checkpoint does not hold are passed over.
  std::vector<std::string> known_sources;
  bool knows_all_sources = false;  // the caller answers for every one that no recipe reads
  // For targets that the checkpoint lacks: the name that the source should have, and the policy,
  // which goes before all others. Those `explained` have a finding of the caller's, and none of
  // their own.
  std::map<std::string, std::string, std::less<>> expected_sources;
  std::map<std::string, MissingPolicy, std::less<>> missing_of;
  std::set<std::string, std::less<>> explained;
};

struct PlanOptions {
  // ---- what changes the result
  Rules rules;
  // Taken from the front of the checkpoint's names where all of them have it and none is the
  // model's as it is. Where only some have it, finding "plan.prefix" gives the rule to use. None:
  // defaults::strip_prefixes.
  std::optional<std::vector<std::string>> strip_prefixes;
  // They go before rules, and the sources that they read are matched by no rule. Those that do not
  // fit are findings "plan.box", "plan.shape" or "plan.recipe".
  Recipes recipes;
  CallerKnowledge caller;
  // Regular expressions (RE2 syntax) of whole names, and the policy for these; the first that
  // matches counts.
  std::vector<std::pair<std::string, MissingPolicy>> missing_patterns;
  // Parameters and persistent floating buffers get this dtype; non-persistent buffers and
  // attributes never. None: the skeleton's dtype.
  std::optional<Dtype> dtype;
  bool dtype_from_file = false;  // "auto": each of them keeps the file's dtype
  // Numbers that are to be quantized and are NaN or infinite become the warning "q.nan"; else they
  // are Error "q.nan" when they are read.
  bool allow_non_finite = false;
  // Targets that are quantized on their way, after the cast to their dtype. A name that is no
  // target's is Error "plan.options".
  std::map<std::string, Quantization, std::less<>> quantize;
  // Added to the targets' numbers on their way. The catalog joins the checkpoint and these, in this
  // order; their modules are the model's, or those of the checkpoint. What does not fit is finding
  // "merge.adapter", a tensor of an adapter that nothing uses "merge.unused". Small tensors and
  // configurations are read when the plan is made, as those of quantized tensors are.
  std::vector<MergeAdapter> adapters;
  // Ties of which adapters change some names only: finding "merge.tie".
  TiePolicy tie = TiePolicy::split;
  DeviceMap device_map;  // empty: where the model at hand holds it, else on "cpu"
  // Bytes per device. For a computed map the capacities, in order of preference; for an explicit
  // map limits that are checked (finding "plan.over_budget").
  std::vector<std::pair<std::string, std::uint64_t>> max_memory;
  std::vector<std::string>
      no_split_modules;  // module paths that a computed map keeps on one device
  // Needed where something placed on "disk" is not in the shard as its reader can take it.
  std::string offload_folder;
  MissingPolicy missing = MissingPolicy::error;
  UnexpectedPolicy unexpected = UnexpectedPolicy::warn;
  // ---- what changes cost only
  // Memory for bytes under way, all threads together.
  std::uint64_t staging_bytes_max = defaults::staging_bytes_max;
  // Readers that the plan counts on; 0: one per core, from first_readers_max to threads_max of
  // defaults.h. Others may execute it, in no more memory.
  unsigned threads = 0;
  // Processes of this machine that load at the same time, this one included. They share the pinned
  // memory that one of them would have: each has less, and copies to GPUs in smaller parts.
  unsigned local_ranks = 1;
  // Hand out views of the file where nothing changes (costs no memory, but the file must stay as it
  // is while the model lives). Never of files that come over a network. Default off.
  bool mmap = false;
};

// How a target reaches its place.
enum class Delivery : std::uint8_t {
  none,        // no bytes move: constructor, tie, excluded ...
  memory,      // written into the destination
  file_view,   // a view of the shard (options.mmap)
  disk_write,  // offloaded: written to the offload folder
  disk_keep,   // offloaded: the shard holds it, in this dtype or one that its reader casts
};

[[nodiscard]] LOADSTONE_API std::string_view name(Delivery delivery) noexcept;

struct LOADSTONE_API PlannedTarget {
  std::string name;
  TargetKind kind = TargetKind::parameter;
  Shape shape;  // of what the model at hand holds
  // Where that begins in the whole tensor, by dimension, if it is a slice of one. Empty: it is not.
  std::vector<std::uint64_t> slice_begin;
  std::vector<std::uint64_t> slice_groups;  // as Slice::groups
  Dtype dtype = Dtype::f32;                 // the final one, or of the numbers that are quantized
  std::string device;                       // as in DeviceMap::entries
  Delivery delivery = Delivery::none;
  Recipe recipe;                             // of the numbers
  std::optional<Quantization> quantization;  // then its parts are delivered, not the numbers

  // Of what is delivered.
  [[nodiscard]] std::uint64_t byte_count() const;
};

// Two names of one tensor, both of which the checkpoint holds. A load compares their values before
// it reads the others, and reports a difference as finding "plan.tie".
struct TieCheck {
  std::string name;         // the target that is a tie
  std::string tied_to;      // the target that it is tied to
  std::uint32_t taken = 0;  // the loaded source: index into the catalog's tensors
  std::uint32_t other = 0;  // the source of the other name
  bool is_error = false;    // a difference ends the load
};

// Plain data, made by make_plan() or plan_from_json(), which check every box against catalog and
// target: execute() relies on that. Thread-safe while nobody writes to it.
struct Plan {
  std::shared_ptr<const Catalog> catalog;
  std::vector<PlannedTarget> targets;  // in the skeleton's order
  std::vector<Decoding> decodings;     // what boxes may copy from beside sources
  std::vector<TieCheck> tie_checks;
  std::vector<Finding> findings;  // sorted, those of the catalog included
  std::string offload_folder;
  bool allow_non_finite = false;  // in what is quantized
  std::uint64_t staging_bytes_max = 0;
  unsigned threads = 1;
  unsigned local_ranks = 1;
  std::uint64_t bytes_to_read = 0;
  std::uint64_t bytes_to_write = 0;  // to the offload folder
  // What the loaded model takes per device, with the values that its constructor and initialisers
  // give (constructor values may exist before the load, but tables of a hundred megabytes are made
  // by it). "cpu" includes the staging that is really needed; "disk" is bytes written.
  std::map<std::string, std::uint64_t> peak_bytes;
  // What decides the devices: the entries given, or those computed. Empty: everything on "cpu".
  std::vector<std::pair<std::string, std::string>> device_map;

  [[nodiscard]] bool ok() const noexcept { return !has_errors(findings); }
};

// Never throws for what it finds: see Plan::findings. Throws Error "plan.rules" for rules that are
// not rules, "plan.options" for options that contradict each other, "skeleton.json" for a broken
// skeleton.
[[nodiscard]] LOADSTONE_API Plan make_plan(std::shared_ptr<const Catalog> catalog,
                                           const Skeleton& skeleton,
                                           const PlanOptions& options = {});

// Throws Error with the code of the first error among the findings, if there is one; its message
// says how many more there are.
LOADSTONE_API void require_ok(const Plan& plan);

// A plan as JSON holds each shard's relative path, size, modification time, inode and header
// digest.
[[nodiscard]] LOADSTONE_API std::string to_json(const Plan& plan);

// The caller's word for paths, for a plan from a file is not believed where it leads.
struct PlanPaths {
  // The checkpoint's folder, or its one file. Empty: the root that the plan names, if it lies in
  // `plan_folder` or its files are those that the plan was made for (by size and inode); else
  // `plan_folder`, if it holds the shards.
  std::string root = {};
  // The same for the checkpoints behind the first: adapters, in the plan's order. Empty or left
  // out: as for `root`.
  std::vector<std::string> other_roots = {};
  // The folder that the plan was read from; empty: none.
  std::string plan_folder = {};
  // Where tensors placed on disk are written. The one that the plan names is never used: Error
  // "plan.offload_folder" where the plan needs one and this is empty.
  std::string offload_folder = {};
  // Whether the URL that the plan names as its root may be contacted (default: Error
  // "plan.remote"). A URL in `root` is the caller's own.
  bool allow_remote = false;
};

// Opens the shards again. Trusts nothing: a shard of another size or header is Error "io.changed"
// (another modification time is a warning finding "io.time"); a box, shape or size that does not
// fit catalog and target is Error "plan.box" or "plan.json".
[[nodiscard]] LOADSTONE_API Plan plan_from_json(std::string_view text,
                                                const OpenOptions& options = {},
                                                const PlanPaths& paths = {});

// A table for people: one row a target (runs of like rows folded), findings, totals.
[[nodiscard]] LOADSTONE_API std::string to_table(const Plan& plan);

}  // namespace loadstone
