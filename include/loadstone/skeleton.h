// Skeleton: the tensors of a model that must have a value after the load.
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

// Returns "parameter", "persistent_buffer", "non_persistent_buffer" or "attribute".
[[nodiscard]] LOADSTONE_API std::string_view name(TargetKind kind) noexcept;
[[nodiscard]] LOADSTONE_API std::optional<TargetKind> parse_target_kind(
    std::string_view name) noexcept;

// Device and dtype of a tensor in a live model.
struct Held {
  std::string device{};  // "cpu", "cuda:0" ...
  Dtype dtype = Dtype::f32;
};

struct Target {
  std::string name{};
  Shape shape{};  // of the whole tensor, as in checkpoints
  Dtype dtype = Dtype::f32;
  TargetKind kind = TargetKind::parameter;
  std::string tie_of{};  // name of the target that this one is tied to; may be empty
  // The slice in the live model, on one of several ranks. nullopt: the whole tensor.
  std::optional<Slice> slice = std::nullopt;
  bool has_value = false;      // the live model already has the constructor's value (never in JSON)
  std::optional<Held> held{};  // nullopt: on meta, or no live model (never in JSON)
};

// Plain data. Thread-safe while no thread writes to it.
struct LOADSTONE_API Skeleton {
  std::vector<Target> targets{};
  // False: Target::has_value has no meaning, because a skeleton read from JSON has no values. The
  // plan then excludes buffers without a value, with a reason. For a live model (true) such a
  // buffer is finding "plan.no_value", an error.
  bool values_known = true;

  // Reads a skeleton. Throws Error "skeleton.json" if it is invalid: malformed JSON, an unknown
  // dtype or kind, a repeated name, or a tie to itself, to an unknown target, or to a target of a
  // different shape or dtype. A tie to a tie refers to the root of both.
  [[nodiscard]] static Skeleton from_json(std::string_view text);
  // Makes a skeleton with one parameter per tensor of the checkpoint, in the tensor's shape and
  // dtype; for block formats the dtype is F32.
  [[nodiscard]] static Skeleton from_catalog(const Catalog& catalog);
  [[nodiscard]] std::string to_json() const;
  // Makes the checks of from_json(), for a skeleton that was built from targets.
  void validate() const;
};

}  // namespace loadstone
