// What a model needs: every tensor that must have a value after the load.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/export.h"
#include "loadstone/shape.h"

namespace loadstone {

class Catalog;

enum class TargetKind : std::uint8_t {
  parameter,
  persistent_buffer,
  non_persistent_buffer,
  attribute,
};

// "parameter", "persistent_buffer", "non_persistent_buffer", "attribute"
[[nodiscard]] LOADSTONE_API std::string_view name(TargetKind kind) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<TargetKind> parse_target_kind(
    std::string_view name) noexcept;

// A tensor with memory, in a model at hand.
struct Held {
  std::string device;  // "cpu", "cuda:0" ...
  Dtype dtype = Dtype::f32;
};

struct Target {
  std::string name;
  Shape shape;  // of the whole tensor, as checkpoints hold it
  Dtype dtype = Dtype::f32;
  TargetKind kind = TargetKind::parameter;
  std::string tie_of;  // the target that this one is the same tensor as; empty: none
  // What the model at hand holds of it, one rank of several. None: all of it.
  std::optional<Slice> slice = std::nullopt;
  bool has_value =
      false;  // the model at hand already holds the constructor's value (never in JSON)
  std::optional<Held> held;  // none: on meta, or there is no model at hand (never in JSON)
};

// Plain data. Not thread-safe while written to.
struct LOADSTONE_API Skeleton {
  std::vector<Target> targets;
  // Whether has_value means anything. A skeleton read from JSON holds no values, and buffers
  // without one are then excluded with a reason; in a model at hand they are finding
  // "plan.no_value", an error.
  bool values_known = true;

  // Throws Error "skeleton.json" for text that is not a skeleton: bad JSON, an unknown dtype or
  // kind, a name given twice, a tie of an unknown target, of itself, or of another shape or
  // dtype. A tie of a tie is one of its root.
  [[nodiscard]] static Skeleton from_json(std::string_view text);
  // One parameter for each tensor of the checkpoint, as it is there; block formats as the F32 that
  // they would be decoded to.
  [[nodiscard]] static Skeleton from_catalog(const Catalog& catalog);
  [[nodiscard]] std::string to_json() const;
  // The same rules as from_json, for a skeleton made in code.
  void validate() const;
};

}  // namespace loadstone
