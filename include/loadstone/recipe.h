// The recipe of a target's value: boxes copied from sources, or an origin that needs no bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/decoding.h"
#include "loadstone/dtype.h"
#include "loadstone/export.h"
#include "loadstone/shape.h"

namespace loadstone {

class Catalog;
struct Merge;

// Origin of a value. Every target has exactly one.
enum class Origin : std::uint8_t {
  checkpoint,
  constructor,  // the value from the model's constructor
  initialiser,  // from the model's own initialiser, run after the load
  zeros,
  constant,
  kept,      // the model's value from before the load
  tie,       // the same tensor as another target
  excluded,  // no value, at the caller's request: the reason names the rule
};

// "checkpoint", "constructor" ...
[[nodiscard]] LOADSTONE_API std::string_view name(Origin origin) noexcept;

// One dimension of a box: `extent` steps, each of `source_stride` and `target_stride` elements.
struct BoxDim {
  std::uint64_t extent = 1;
  std::uint64_t source_stride = 0;
  std::uint64_t target_stride = 0;

  friend bool operator==(const BoxDim&, const BoxDim&) = default;
};

inline constexpr std::uint32_t no_decoding = UINT32_MAX;

// A strided N-d region copied from a source to a target, with a cast if the dtypes differ: the only
// primitive of movement. Stack, concat, split, transpose, slice and interleave are sets of boxes.
// Offsets and strides count elements from the tensor's first.
struct Box {
  std::uint32_t source = 0;  // index into Catalog::tensors()
  std::uint64_t source_offset = 0;
  std::uint64_t target_offset = 0;
  // Outermost first by target stride; empty: one element. A target without elements has one box per
  // source, with one dimension of extent 0, which records its provenance.
  std::vector<BoxDim> dims;
  // Index into the plan's decodings, if the box copies from a decoded tensor; `source` is then the
  // first tensor to decode.
  std::uint32_t decoding = no_decoding;

  friend bool operator==(const Box&, const Box&) = default;
};

// A value known before anything is read: little-endian bytes of whole elements. Shared and never
// changed.
using Constant = std::shared_ptr<const std::vector<std::byte>>;

// Limit for all constants together; more would be a checkpoint.
inline constexpr std::uint64_t constant_bytes_max = 16u << 20;

struct Recipe {
  Origin origin = Origin::excluded;
  std::vector<Box> boxes;              // origin checkpoint: together they write each element once
  std::shared_ptr<const Merge> merge;  // see merge.h; null: only boxes
  Constant constant;                   // origin constant: as many bytes as the target has
  std::string tie_of;                  // origin tie
  std::string reason;                  // origin excluded
  // Tensors whose values planning read: alphas, scales that became constants.
  std::vector<std::uint32_t> decided_by;
};

// A recipe for one target computed by other code, such as a trace of a library's own converter.
struct TargetRecipe {
  std::string target;
  Shape shape;
  Dtype dtype = Dtype::f32;                 // of the result; the target's dtype may differ
  std::vector<Box> boxes;                   // together they write each element once
  Constant constant;                        // instead of boxes
  std::shared_ptr<const Merge> merge;       // in addition to boxes
  std::vector<std::uint32_t> decided_by{};  // see Recipe
};

// Plain data from a RecipeBuilder or recipes_from_json(). Boxes refer to the catalog that it was
// made for; a plan checks them. Thread-safe while nobody writes to it.
struct Recipes {
  std::vector<TargetRecipe> targets;
  std::vector<Decoding> decodings;
  // Sources whose values constants were computed from, and a digest of these and of config.json.
  // Empty: unknown.
  std::vector<std::uint32_t> computed_from;
  std::string values_digest;
};

// Records the checkpoint that constants were computed for, so that conversions of a different one
// warn. Reads the sources and config.json. Throws Error "plan.missing" for a name that the catalog
// lacks.
LOADSTONE_API void note_values(Recipes& recipes, const std::shared_ptr<const Catalog>& catalog,
                               const std::vector<std::string>& computed_from);

// Returns compact JSON, which a cache of recipes stores.
[[nodiscard]] LOADSTONE_API std::string to_json(const Recipes& recipes, const Catalog& catalog);
// Trusts nothing: throws Error "plan.recipe" for malformed text, and for sources that the catalog
// lacks or that have another shape, encoding or codes there.
[[nodiscard]] LOADSTONE_API Recipes recipes_from_json(const Catalog& catalog,
                                                      std::string_view text);

// Operation of a rule on the tensors that it matches.
enum class RuleOp : std::uint8_t {
  rename,        // one source, one target
  stack,         // sources become slices of a new dimension `dim`
  concat,        // sources joined along `dim`
  stack_concat,  // each pattern's sources stacked along dims[0], then joined along dims[1]
  split,         // one source cut along `dim` into all targets: `sizes`, or equal parts
  transpose,     // one source, `dims` swapped
  permute,       // one source, dimensions in the order `dims`
  slice,         // one source, [start, start + sizes[0]) of `dim`
  reshape,       // one source, new shape `sizes` of the same number of elements
};

// A further step on a rule's result. Views only: transpose, permute, slice, reshape.
struct RuleStep {
  RuleOp op = RuleOp::reshape;
  std::vector<std::int64_t> dims;
  std::vector<std::uint64_t> sizes;
  std::uint64_t start = 0;
};

// A rule. `sources` are regular expressions (RE2 syntax, whole name); `targets` are templates in
// which $1 ... $9 are replaced by groups, and $$ by a dollar sign. Sources of one target are
// ordered by pattern, then by the groups that the template does not use, integers by value (expert
// 10 comes after expert 9), then by name. Negative dimensions count from the end. In an ordered
// list the first match wins; tensors that no rule matches keep their names.
struct Rule {
  RuleOp op = RuleOp::rename;
  std::vector<std::string> sources;
  std::vector<std::string> targets;
  std::vector<std::int64_t> dims;    // JSON: "dim" (one) or "dims"
  std::vector<std::uint64_t> sizes;  // split, slice, reshape
  std::uint64_t start = 0;           // slice
  std::vector<RuleStep> then;        // applied to each target of the rule, in this order
};

[[nodiscard]] LOADSTONE_API std::string_view name(RuleOp op) noexcept;

using Rules = std::vector<Rule>;

// Throw Error "plan.rules" with the rule's index and field.
[[nodiscard]] LOADSTONE_API Rules rules_from_json(std::string_view text);
[[nodiscard]] LOADSTONE_API std::string rules_to_json(const Rules& rules);

}  // namespace loadstone
