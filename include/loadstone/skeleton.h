// The tensors of a model that must have a value after the load.
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

// Memory of a tensor in a live model.
struct Held {
  std::string device;  // "cpu", "cuda:0" ...
  Dtype dtype = Dtype::f32;
};

struct Target {
  std::string name;
  Shape shape;  // of the whole tensor, as in checkpoints
  Dtype dtype = Dtype::f32;
  TargetKind kind = TargetKind::parameter;
  std::string tie_of;  // the target that this one is tied to; may be empty
  // The slice in the live model, on one of several ranks. nullopt: the whole tensor.
  std::optional<Slice> slice = std::nullopt;
  bool has_value = false;    // the live model already has the constructor's value (never in JSON)
  std::optional<Held> held;  // nullopt: on meta, or without a live model (never in JSON)
};

// Plain data. Not thread-safe while written to.
struct LOADSTONE_API Skeleton {
  std::vector<Target> targets;
  // False if has_value is meaningless: a skeleton read from JSON has no values, and buffers without
  // one are excluded with a reason. In a live model they are finding "plan.no_value", an error.
  bool values_known = true;

  // Throws Error "skeleton.json" for an invalid skeleton: malformed JSON, an unknown dtype or kind,
  // a repeated name, a tie to itself, to an unknown target, or to one of another shape or dtype. A
  // tie to a tie refers to its root.
  [[nodiscard]] static Skeleton from_json(std::string_view text);
  // One parameter per tensor of the checkpoint, unchanged; block formats as decoded F32.
  [[nodiscard]] static Skeleton from_catalog(const Catalog& catalog);
  [[nodiscard]] std::string to_json() const;
  // Builds a skeleton from targets, with the checks of from_json().
  void validate() const;
};

}  // namespace loadstone
