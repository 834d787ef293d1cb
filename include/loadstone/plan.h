// Plans: the recipe, placement and origin of every target, decided before a weight is read.
// Planning uses no threads and no clock. It reads only the data that it needs for decisions:
// configs, quant states, and adapters' alphas and matrices for tied names.
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

// Policy for targets that the checkpoint lacks. `keep` keeps the value that the live model has
// (origin kept); a target without a value is then missing.
enum class MissingPolicy : std::uint8_t { error, initialise, zeros, keep };
enum class UnexpectedPolicy : std::uint8_t { warn, error, ignore };
enum class DeviceMapMode : std::uint8_t { automatic, balanced, balanced_low_0, sequential };

// Returns the name that Python and the command use: "zeros", "warn", "auto" ...
[[nodiscard]] LOADSTONE_API std::string_view name(MissingPolicy policy) noexcept;
[[nodiscard]] LOADSTONE_API std::string_view name(UnexpectedPolicy policy) noexcept;
[[nodiscard]] LOADSTONE_API std::string_view name(DeviceMapMode mode) noexcept;

// Placement of modules on devices. An entry is a module path ("" is the whole model) with a device
// as a string, which includes the index: "cpu", "disk", "cuda:0" ..., or "meta" (the targets get
// no value and are listed as excluded). The longest path that matches wins.
struct DeviceMap {
  // If set, loadstone computes the map from sizes and max_memory, and ignores `entries`.
  std::optional<DeviceMapMode> mode{};
  std::vector<std::pair<std::string, std::string>> entries{};
  // Module paths without tensors. An entry that matches nothing in the model is an error, finding
  // "plan.device_map"; the skeleton has only modules with tensors, so modules without tensors are
  // listed here.
  std::set<std::string, std::less<>> bare_modules{};
  // Report a warning for an entry that matches nothing, because some libraries ignore it.
  bool allows_unknown = false;

  [[nodiscard]] bool empty() const noexcept { return !mode && entries.empty(); }
};

// Facts from a library adapter, which knows how its library loads the model. Other callers leave
// all members empty.
struct CallerKnowledge {
  // Sources that the caller handles: no rule matches them, targets of the same name do not use
  // them, and the plan does not report them as unexpected. Names that the checkpoint lacks are
  // ignored.
  std::vector<std::string> known_sources{};
  bool knows_all_sources = false;  // the caller handles every source that no recipe reads
  // For targets that the checkpoint lacks: the expected source name, and a policy that takes
  // precedence over all others. The caller reports its own findings for the `explained` targets.
  std::map<std::string, std::string, std::less<>> expected_sources{};
  std::map<std::string, MissingPolicy, std::less<>> missing_of{};
  std::set<std::string, std::less<>> explained{};
  std::string missing_advice{};  // replaces the suggestions for missing targets
};

struct PlanOptions {
  // ---- These change the result.
  Rules rules{};
  // Prefixes to strip from the checkpoint's names if all names have the prefix and no name matches
  // the model unchanged. If only some names have it, finding "plan.prefix" suggests a rule.
  // nullopt: defaults::strip_prefixes.
  std::optional<std::vector<std::string>> strip_prefixes{};
  // Recipes take precedence over rules, which do not match the sources that recipes read. Invalid
  // recipes are findings "plan.box", "plan.shape" or "plan.recipe".
  Recipes recipes{};
  CallerKnowledge caller{};
  // Patterns (RE2 syntax) for whole names of targets, each with the policy for the matching targets
  // that the checkpoint lacks. The first match wins.
  std::vector<std::pair<std::string, MissingPolicy>> missing_patterns{};
  // Dtype of parameters and of persistent floating-point buffers. Non-persistent buffers and
  // attributes keep the skeleton's dtype. nullopt: the skeleton's dtype.
  std::optional<Dtype> dtype{};
  bool dtype_from_file = false;  // "auto": parameters and buffers get the file's dtype
  // Report non-finite values that are to be quantized as warning "q.nan", instead of throwing Error
  // "q.nan" when the load reads them.
  bool allow_non_finite = false;
  // Quantization of targets during the load, after the cast to their dtype. Throws Error
  // "plan.options" for a name that is not a target.
  std::map<std::string, Quantization, std::less<>> quantize{};
  // Adapters to add to the targets during the load. The catalog joins the checkpoint and the
  // adapters, in this order. The module names in an adapter are those of the model or of the
  // checkpoint. Mismatches are finding "merge.adapter", unused tensors of an adapter
  // "merge.unused". Planning reads the adapters' small tensors and configs.
  std::vector<MergeAdapter> adapters{};
  // Policy for ties if adapters change only some of the tied names: finding "merge.tie".
  TiePolicy tie = TiePolicy::split;
  DeviceMap device_map{};  // empty: the live model's devices, else "cpu"
  // Bytes per device: for a computed map the capacities in order of preference, for an explicit map
  // limits (finding "plan.over_budget").
  std::vector<std::pair<std::string, std::uint64_t>> max_memory{};
  // Paths of modules that a computed map does not split between devices. nullopt: the outermost
  // modules with a number for a name ("layers.3"), if twice their size fits on a device.
  std::optional<std::vector<std::string>> no_split_modules{};
  // Required if something placed on "disk" cannot be read from the shard unchanged.
  std::string offload_folder{};
  MissingPolicy missing = MissingPolicy::error;
  UnexpectedPolicy unexpected = UnexpectedPolicy::warn;
  // ---- These change only the cost.
  // Memory for bytes in flight, for all threads together.
  std::uint64_t staging_bytes_max = defaults::staging_bytes_max;
  // Number of reader threads that the plan assumes; 0: one per core, from first_readers_max to
  // threads_max of defaults.h. More threads may execute the plan, with no more memory.
  unsigned threads = 0;
  // Number of processes on this machine that load at the same time, including this one. The
  // processes share the pinned memory that one process would use, so each one copies to GPUs in
  // smaller parts.
  unsigned local_ranks = 1;
  // Deliver unchanged tensors as views of the file. They take no memory, but the file must not
  // change while the model lives. loadstone never does this for files read over a network.
  bool mmap = false;
};

// The way in which a target's value is delivered.
enum class Delivery : std::uint8_t {
  none,        // no bytes move: constructor, tie, excluded ...
  memory,      // written into the destination
  file_view,   // a view of the shard (PlanOptions::mmap)
  disk_write,  // offloaded: written to the offload folder
  disk_keep,   // offloaded: stays in the shard; its reader casts a different dtype
};

[[nodiscard]] LOADSTONE_API std::string_view name(Delivery delivery) noexcept;

struct LOADSTONE_API PlannedTarget {
  std::string name;
  TargetKind kind = TargetKind::parameter;
  Shape shape;  // shape of the tensor in the live model
  // First index of the slice in the whole tensor, per dimension. Empty: the target is not a slice.
  std::vector<std::uint64_t> slice_begin;
  std::vector<std::uint64_t> slice_groups;  // see Slice::groups
  Dtype dtype = Dtype::f32;                 // final, or before quantization
  std::string device;                       // as in DeviceMap::entries
  Delivery delivery = Delivery::none;
  Recipe recipe;                             // recipe of the value before quantization
  std::optional<Quantization> quantization;  // if set, the components are delivered

  // Returns the number of bytes to deliver.
  [[nodiscard]] std::uint64_t byte_count() const;
};

// Two names of one tensor if the checkpoint has a tensor for each. A load compares their values
// before it reads other tensors, and reports a difference as finding "plan.tie".
struct TieCheck {
  std::string name;         // the target that is a tie
  std::string tied_to;      // the target that it is tied to
  std::uint32_t taken = 0;  // index into the catalog's tensors: the source that is loaded
  std::uint32_t other = 0;  // index into the catalog's tensors: the source of the other name
  bool is_error = false;    // the load fails if the values differ
};

// Plain data from make_plan() or plan_from_json(), which check every box against the catalog and
// the target; execute() relies on these checks. Thread-safe while no thread writes to it.
struct Plan {
  std::shared_ptr<const Catalog> catalog;
  std::vector<PlannedTarget> targets;  // in the skeleton's order
  std::vector<Decoding> decodings;     // virtual tensors that boxes copy from
  std::vector<TieCheck> tie_checks;
  std::vector<Finding> findings;  // sorted, including the catalog's
  std::string offload_folder;
  bool allow_non_finite = false;  // accept non-finite values in tensors to quantize
  std::uint64_t staging_bytes_max = 0;
  unsigned threads = 1;
  unsigned local_ranks = 1;
  std::uint64_t bytes_to_read = 0;
  std::uint64_t bytes_to_write = 0;  // to the offload folder
  // Memory of the loaded model per device, including constructor and initialiser values.
  // (Constructor values may exist before the load, but the load creates some of them, such as
  // tables of a hundred megabytes.) "cpu" includes the staging that the load needs; "disk" is the
  // bytes written.
  std::map<std::string, std::uint64_t> peak_bytes;
  // Modules with their devices, as given or computed. Empty: everything is on "cpu".
  std::vector<std::pair<std::string, std::string>> device_map;

  [[nodiscard]] bool ok() const noexcept { return !has_errors(findings); }
};

// Makes a plan. Reports problems of the checkpoint in Plan::findings instead of exceptions. Throws
// Error "plan.rules" for invalid rules, "plan.options" for contradictory options, "skeleton.json"
// for an invalid skeleton.
[[nodiscard]] LOADSTONE_API Plan make_plan(std::shared_ptr<const Catalog> catalog,
                                           const Skeleton& skeleton,
                                           const PlanOptions& options = {});

// Throws the first error among the findings as an Error, whose message counts the other errors, and
// Error "usage" for a plan without a catalog.
LOADSTONE_API void require_ok(const Plan& plan);

// Returns the plan as JSON, with each shard's relative path, size, modification time, inode and
// header digest.
[[nodiscard]] LOADSTONE_API std::string to_json(const Plan& plan);

// Paths to use with a plan that was read from a file. loadstone does not trust paths in the file.
struct PlanPaths {
  // The checkpoint's folder, or its only file. Empty: the root in the plan, if it is in
  // `plan_folder` or its files are the planned ones (by size and inode); otherwise `plan_folder`,
  // if it has the shards.
  std::string root = {};
  // Roots of the other checkpoints (adapters), in the plan's order. loadstone finds the roots for
  // empty strings and omitted elements like an empty `root`.
  std::vector<std::string> other_roots = {};
  // The folder that the plan was read from; empty: none.
  std::string plan_folder = {};
  // Folder for tensors placed on disk. loadstone never uses the folder in the plan: throws Error
  // "plan.offload_folder" if the plan needs a folder and this is empty.
  std::string offload_folder = {};
  // Allow contact with a URL stored in the plan (default: Error "plan.remote"). A URL in `root` is
  // always allowed.
  bool allow_remote = false;
};

// Reads a plan from JSON, opens its shards again and checks everything. Throws Error "io.changed"
// if a shard has a different size or header (a different modification time is warning "io.time"),
// and Error "plan.box" or "plan.json" if a box, shape or size does not fit the catalog and target.
[[nodiscard]] LOADSTONE_API Plan plan_from_json(std::string_view text,
                                                const OpenOptions& options = {},
                                                const PlanPaths& paths = {});

// Returns the plan as text: one row per target, with runs of similar rows folded, findings, totals.
[[nodiscard]] LOADSTONE_API std::string to_table(const Plan& plan);

}  // namespace loadstone
