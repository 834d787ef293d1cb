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

// The kind of place that a value comes from. Every target has exactly one origin.
enum class Origin : std::uint8_t {
  checkpoint,
  constructor,  // the value from the model's constructor
  initialiser,  // the value from the model's own initialiser, which runs after the load
  zeros,
  constant,
  kept,      // the value that the model had before the load
  tie,       // the target is the same tensor as another target
  excluded,  // no value, at the caller's request; Recipe::reason names the rule
};

// Returns "checkpoint", "constructor" ...
[[nodiscard]] LOADSTONE_API std::string_view name(Origin origin) noexcept;

// One dimension of a box: `extent` elements, which are `source_stride` elements apart in the source
// and `target_stride` elements apart in the target.
struct BoxDim {
  std::uint64_t extent = 1;
  std::uint64_t source_stride = 0;
  std::uint64_t target_stride = 0;

  friend bool operator==(const BoxDim&, const BoxDim&) = default;
};

inline constexpr std::uint32_t no_decoding = UINT32_MAX;

// A strided N-dimensional region that is copied from a source to a target, with a cast if the
// dtypes differ. All movement of values is a set of boxes: stack, concat, split, transpose, slice
// and interleave. Offsets and strides count elements from the tensor's first.
struct Box {
  std::uint32_t source = 0;  // index into Catalog::tensors()
  std::uint64_t source_offset = 0;
  std::uint64_t target_offset = 0;
  // Dimensions, outermost first by target stride; empty: one element. A target without elements has
  // one box per source, with one dimension of extent 0, which records the sources.
  std::vector<BoxDim> dims{};
  // Index into the plan's decodings if the box copies from a decoded tensor; `source` is then the
  // first tensor that is decoded. no_decoding: the box copies from `source` itself.
  std::uint32_t decoding = no_decoding;

  friend bool operator==(const Box&, const Box&) = default;
};

// A value that is known before anything is read: little-endian bytes of whole elements. Shared and
// never changed.
using Constant = std::shared_ptr<const std::vector<std::byte>>;

// Limit for all constants of a plan together. More data than this belongs in a checkpoint.
inline constexpr std::uint64_t constant_bytes_max = 16u << 20;

struct Recipe {
  Origin origin = Origin::excluded;
  std::vector<Box> boxes{};              // origin checkpoint: together they write each element once
  std::shared_ptr<const Merge> merge{};  // terms to add, see merge.h; null: only boxes
  Constant constant{};                   // origin constant: as many bytes as the target has
  std::string tie_of{};                  // origin tie: name of the target that this one is tied to
  std::string reason{};                  // origin excluded: why
  // Tensors whose values planning read: alphas, and scales that became constants.
  std::vector<std::uint32_t> decided_by{};
};

// A recipe for one target that other code computed, such as a trace of a library's own converter.
struct TargetRecipe {
  std::string target{};
  Shape shape{};
  Dtype dtype = Dtype::f32;                 // of the result; the target's dtype may differ
  std::vector<Box> boxes{};                 // together they write each element once
  Constant constant{};                      // if set, `boxes` is empty
  std::shared_ptr<const Merge> merge{};     // terms to add to the boxes
  std::vector<std::uint32_t> decided_by{};  // see Recipe::decided_by
};

// Plain data from a RecipeBuilder or recipes_from_json(). Boxes refer to the catalog that the
// recipes were made for; a plan checks them. Thread-safe while no thread writes to it.
struct Recipes {
  std::vector<TargetRecipe> targets{};
  std::vector<Decoding> decodings{};
  // Sources whose values the constants were computed from, and a digest of these values and of
  // config.json. Empty: unknown.
  std::vector<std::uint32_t> computed_from{};
  std::string values_digest{};
};

// Records in `recipes` the values that its constants were computed from, so that a conversion of a
// checkpoint with different values warns. Reads the sources and config.json. Throws Error
// "plan.missing" for a name that the catalog lacks.
LOADSTONE_API void note_values(Recipes& recipes, const std::shared_ptr<const Catalog>& catalog,
                               const std::vector<std::string>& computed_from);

// Returns the recipes as compact JSON, the form in which loadstone caches them.
[[nodiscard]] LOADSTONE_API std::string to_json(const Recipes& recipes, const Catalog& catalog);
// Reads recipes from JSON and checks everything: throws Error "plan.recipe" for malformed text, and
// for a source that the catalog lacks or that has a different shape, encoding or codes there.
[[nodiscard]] LOADSTONE_API Recipes recipes_from_json(const Catalog& catalog,
                                                      std::string_view text);

// Operation of a rule on the tensors that it matches.
enum class RuleOp : std::uint8_t {
  rename,        // one source becomes one target
  stack,         // sources become slices of a new dimension `dim`
  concat,        // sources are joined along `dim`
  stack_concat,  // each pattern's sources are stacked along dims[0], then joined along dims[1]
  split,         // one source is cut along `dim` into all targets, of `sizes` or of equal size
  transpose,     // the dimensions `dims` of one source are swapped
  permute,       // the dimensions of one source are put in the order `dims`
  slice,         // [start, start + sizes[0]) of dimension `dim` of one source
  reshape,       // one source gets the shape `sizes`, with the same number of elements
};

// A further step on a rule's result. Must be an operation that moves no data: transpose, permute,
// slice or reshape.
struct RuleStep {
  RuleOp op = RuleOp::reshape;
  std::vector<std::int64_t> dims{};
  std::vector<std::uint64_t> sizes{};
  std::uint64_t start = 0;
};

// A rule. `sources` are patterns (RE2 syntax) for whole names; `targets` are templates in which
// loadstone replaces $1 ... $9 by the groups of the pattern, and $$ by a dollar sign. The sources
// of one target are ordered by pattern, then by the groups that the template does not use, integers
// by value (expert 10 comes after expert 9), then by name. Negative dimensions count from the end.
// In a list of rules the first match wins; tensors that no rule matches keep their names.
struct Rule {
  RuleOp op = RuleOp::rename;
  std::vector<std::string> sources{};
  std::vector<std::string> targets{};
  std::vector<std::int64_t> dims{};    // in JSON "dim" (one dimension) or "dims"
  std::vector<std::uint64_t> sizes{};  // for split, slice, reshape
  std::uint64_t start = 0;             // for slice
  std::vector<RuleStep> then{};        // applied to each target of the rule, in this order
};

[[nodiscard]] LOADSTONE_API std::string_view name(RuleOp op) noexcept;

using Rules = std::vector<Rule>;

// Read and write rules as JSON. Throw Error "plan.rules" with the rule's index and field.
[[nodiscard]] LOADSTONE_API Rules rules_from_json(std::string_view text);
[[nodiscard]] LOADSTONE_API std::string rules_to_json(const Rules& rules);

}  // namespace loadstone
