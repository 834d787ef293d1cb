// How a target gets its value: boxes copied from sources, or an origin that needs no bytes.
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

// Where a value comes from. Every target has exactly one.
enum class Origin : std::uint8_t {
  checkpoint,
  constructor,  // the value that the model's constructor made
  initialiser,  // the model's own initialiser, run after the load
  zeros,
  constant,
  kept,      // the value that the model held before the load
  tie,       // the same tensor as another target
  excluded,  // no value, as the caller asked: the reason says which rule
};

// "checkpoint", "constructor" ...
[[nodiscard]] LOADSTONE_API std::string_view name(Origin origin) noexcept;

// One dimension of a box: `extent` steps, each moving so many elements on either side.
struct BoxDim {
  std::uint64_t extent = 1;
  std::uint64_t source_stride = 0;
  std::uint64_t target_stride = 0;

  friend bool operator==(const BoxDim&, const BoxDim&) = default;
};

inline constexpr std::uint32_t no_decoding = UINT32_MAX;

// A strided N-d region copied from a source to a target, cast where the dtypes differ: the one
// primitive of movement. Stack, concat, split, transpose, slice and interleave are all sets of
// boxes. Offsets and strides count elements, from the first element of the tensor.
struct Box {
  std::uint32_t source = 0;  // index into Catalog::tensors()
  std::uint64_t source_offset = 0;
  std::uint64_t target_offset = 0;
  // Outermost first by target stride; none: one element. A target without elements has one box with
  // one dimension of extent 0 for each source, so that its provenance is known.
  std::vector<BoxDim> dims;
  // Index into the decodings beside the boxes: it copies from what that gives, and `source` is the
  // first tensor that is decoded.
  std::uint32_t decoding = no_decoding;

  friend bool operator==(const Box&, const Box&) = default;
};

// Values that are known before anything is read: little-endian bytes of whole elements. Shared by
// whoever holds it, and never changed.
using Constant = std::shared_ptr<const std::vector<std::byte>>;

// More of them together would be a checkpoint of their own.
inline constexpr std::uint64_t constant_bytes_max = 16u << 20;

struct Recipe {
  Origin origin = Origin::excluded;
  std::vector<Box> boxes;              // origin checkpoint: together they write each element once
  std::shared_ptr<const Merge> merge;  // see merge.h; null: the boxes are all there is
  Constant constant;                   // origin constant: as many bytes as the target has
  std::string tie_of;                  // origin tie
  std::string reason;                  // origin excluded
  // Tensors whose values were read to plan this: alphas, scales that became constants.
  std::vector<std::uint32_t> decided_by;
};

// What something worked out that one target is made of: a trace of a library's own converter, say.
struct TargetRecipe {
  std::string target;
  Shape shape;
  Dtype dtype = Dtype::f32;            // what the sources become; a target may want another one
  std::vector<Box> boxes;              // together they write each element once
  Constant constant;                   // in place of boxes
  std::shared_ptr<const Merge> merge;  // beside boxes
  std::vector<std::uint32_t> decided_by{};  // see Recipe
};

// Plain data, made by a RecipeBuilder or recipes_from_json(). Boxes count on the catalog that it
// was made for, and are checked when a plan is made of them. Thread-safe while nobody writes to it.
struct Recipes {
  std::vector<TargetRecipe> targets;
  std::vector<Decoding> decodings;
  // Sources whose values constants were computed from, and a digest of these and of config.json.
  // Empty: not known.
  std::vector<std::uint32_t> computed_from;
  std::string values_digest;
};

// Records the checkpoint that constants were computed for: conversions of another one warn. Reads
// the sources and config.json. Throws Error "plan.missing" for a name that is not in the catalog.
LOADSTONE_API void note_values(Recipes& recipes, const std::shared_ptr<const Catalog>& catalog,
                               const std::vector<std::string>& computed_from);

// Compact: what a cache of plans stores.
[[nodiscard]] LOADSTONE_API std::string to_json(const Recipes& recipes, const Catalog& catalog);
// Trusts nothing: Error "plan.recipe" for text that is no such JSON, and for sources that the
// catalog lacks or that differ there in shape, encoding or codes.
[[nodiscard]] LOADSTONE_API Recipes recipes_from_json(const Catalog& catalog,
                                                      std::string_view text);

// What one rule does with the tensors that it matches.
enum class RuleOp : std::uint8_t {
  rename,        // one source, one target
  stack,         // sources become slices of a new dimension `dim`
  concat,        // sources joined along `dim`
  stack_concat,  // each pattern's sources stacked along dims[0], then the stacks joined along
                 // dims[1]
  split,         // one source cut along `dim` into all targets: `sizes`, or equal parts
  transpose,     // one source, `dims` swapped
  permute,       // one source, dimensions in the order `dims`
  slice,         // one source, [start, start + sizes[0]) of `dim`
  reshape,       // one source, new shape `sizes` of the same number of elements
};

// One more step on what a rule made. Views only: transpose, permute, slice, reshape.
struct RuleStep {
  RuleOp op = RuleOp::reshape;
  std::vector<std::int64_t> dims;
  std::vector<std::uint64_t> sizes;
  std::uint64_t start = 0;
};

// A rule as data. `sources` are regular expressions (RE2 syntax, whole name); `targets` are
// templates in which $1 ... $9 stand for groups. Sources of one target are ordered by pattern, then
// by the groups that the template does not use, numbers by value (so expert 10 comes after expert
// 9), then by name. $$ is a dollar sign. Dimensions may be negative, counted from the end. In an
// ordered list the first match wins; tensors that no rule matches keep their names.
struct Rule {
  RuleOp op = RuleOp::rename;
  std::vector<std::string> sources;
  std::vector<std::string> targets;
  std::vector<std::int64_t> dims;    // JSON: "dim" (one) or "dims"
  std::vector<std::uint64_t> sizes;  // split, slice, reshape
  std::uint64_t start = 0;           // slice
  std::vector<RuleStep> then;        // done to each target of the rule, in this order
};

[[nodiscard]] LOADSTONE_API std::string_view name(RuleOp op) noexcept;

using Rules = std::vector<Rule>;

// Throw Error "plan.rules" that names the rule's index and field.
[[nodiscard]] LOADSTONE_API Rules rules_from_json(std::string_view text);
[[nodiscard]] LOADSTONE_API std::string rules_to_json(const Rules& rules);

}  // namespace loadstone
