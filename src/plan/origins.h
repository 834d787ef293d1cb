// Tables of the origins of values, and of the policies for tensors that the checkpoint lacks. A row
// contains everything that depends on one origin or policy.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "boxes/value.h"
#include "loadstone/plan.h"

namespace loadstone {

enum class GivenBy : std::uint8_t {
  execute,  // execute() writes the value
  caller,   // the caller of execute() writes the value in the same load
  model,    // the live model already has the value
  nobody,
};

// The evidence that an audit requires before it accepts a target as loaded.
enum class Proof : std::uint8_t {
  sources,  // the ranges read, and either all bytes written or a view of the file
  bytes,    // all bytes written
  memory,   // the tensor's device is not "meta"
  reason,   // a reason why the target has no value
};

struct OriginRow {
  std::string_view name{};
  GivenBy given_by = GivenBy::nobody;
  Proof proof = Proof::memory;
  // Text for a target that the checkpoint lacks: `planned` for the plan's finding, `filled` for the
  // Python package's warning.
  std::string_view planned{};
  std::string_view filled{};
  Fill fill = fill_zeros;  // used if execute() writes the value without a source
};

[[nodiscard]] constexpr OriginRow origin_row(Origin origin) noexcept {
  switch (origin) {
    case Origin::checkpoint:
      return {"checkpoint", GivenBy::execute, Proof::sources};
    case Origin::constructor:
      return {"constructor", GivenBy::model, Proof::memory, "the constructor's value is kept",
              "with the constructor's values"};
    case Origin::initialiser:
      return {"initialiser", GivenBy::caller, Proof::memory,
              "the model's initialiser sets the value", "by the model's initialisers"};
    case Origin::zeros:
      return {"zeros", GivenBy::execute, Proof::bytes, "filled with zeros", "with zeros"};
    case Origin::constant:
      return {"constant", GivenBy::execute, Proof::bytes};
    case Origin::kept:
      return {"kept", GivenBy::model, Proof::memory};
    case Origin::tie:
      return {"tie", GivenBy::nobody, Proof::memory};
    case Origin::excluded:
      return {"excluded", GivenBy::nobody, Proof::reason};
  }
  return {};
}

// Returns true if execute() writes the values of this origin.
[[nodiscard]] constexpr bool is_delivered(Origin origin) noexcept {
  return origin_row(origin).given_by == GivenBy::execute;
}

struct MissingRow {
  std::string_view name{};
  std::optional<Origin> gives{};  // origin of a target without a source; nullopt: an error
  bool needs_model = false;       // requires a live model, which the command does not have
};

[[nodiscard]] constexpr MissingRow missing_row(MissingPolicy policy) noexcept {
  switch (policy) {
    case MissingPolicy::error:
      return {"error"};
    case MissingPolicy::initialise:
      return {"initialise", Origin::initialiser, true};
    case MissingPolicy::zeros:
      return {"zeros", Origin::zeros};
    case MissingPolicy::keep:
      return {"keep", std::nullopt, true};
  }
  return {};
}

}  // namespace loadstone
